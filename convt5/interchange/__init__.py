"""Models in the formats of others: read into ConvT5, and written from it.

`mesh_tf` reads TensorFlow 1 checkpoints, `hugging_face` reads and writes T5 directories, `portable`
writes safetensors with a JSON description, `stablehlo` writes programs. `convt5.convert` is the
command line of all of them.
"""
