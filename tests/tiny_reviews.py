"""Registers the task of `tiny_run` for processes that tests start."""

import tiny_run
from convt5.tasks import metrics

NAME = "reviews_of_several_hosts"
tiny_run.add_task(NAME, metric_fns=[metrics.accuracy])
