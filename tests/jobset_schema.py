"""The fields of a JobSet (jobset.x-k8s.io/v1alpha2) that launch/gke.py writes, as a JSON schema.

Written from the public documentation of the API, https://jobset.sigs.k8s.io/docs/reference/, and of
Job and Pod in Kubernetes 1.31. An unknown field is an error, as for the API server in strict mode.
"""

NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
COUNT = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
LABELS = {"type": "object", "additionalProperties": {"type": "string"}}


def fields(required=(), **properties):
    return {
        "type": "object",
        "required": list(required),
        "additionalProperties": False,
        "properties": properties,
    }


def many(items, **rules):
    return {"type": "array", "items": items, **rules}


METADATA = fields(name=NAME, namespace=NAME, labels=LABELS, annotations=LABELS)
RESOURCES = {"type": "object", "additionalProperties": {"type": "string", "pattern": "^[0-9]+"}}
CONTAINER = fields(
    ["name", "image"],
    name=NAME,
    image={"type": "string", "minLength": 1},
    command=many({"type": "string"}),
    args=many({"type": "string"}),
    env=many(fields(["name"], name={"type": "string"}, value={"type": "string"})),
    ports=many(
        fields(["containerPort"], containerPort={"type": "integer", "minimum": 1, "maximum": 65535})
    ),
    resources=fields(requests=RESOURCES, limits=RESOURCES),
)
POD = fields(
    ["containers"],
    containers=many(CONTAINER, minItems=1),
    # What a Job allows.
    restartPolicy={"enum": ["Never", "OnFailure"]},
    nodeSelector=LABELS,
    terminationGracePeriodSeconds=COUNT,
)
EXIT_CODES = fields(
    ["operator", "values"],
    containerName=NAME,
    operator={"enum": ["In", "NotIn"]},
    values=many(COUNT, minItems=1, maxItems=255, uniqueItems=True),
)
JOB = fields(
    ["template"],
    parallelism=COUNT,
    completions=COUNT,
    completionMode={"enum": ["Indexed", "NonIndexed"]},
    backoffLimit=COUNT,
    podFailurePolicy=fields(
        ["rules"],
        rules=many(
            fields(
                ["action"],
                action={"enum": ["FailJob", "FailIndex", "Ignore", "Count"]},
                onExitCodes=EXIT_CODES,
            ),
            maxItems=20,
        ),
    ),
    template=fields(["spec"], metadata=METADATA, spec=POD),
)
FAILURE_RULE = fields(
    ["action"],
    name={"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
    action={"enum": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]},
    onJobFailureReasons=many(
        {
            "enum": [
                "BackoffLimitExceeded",
                "DeadlineExceeded",
                "FailedIndexes",
                "MaxFailedIndexesExceeded",
                "PodFailurePolicy",
            ]
        }
    ),
    targetReplicatedJobs=many(NAME),
)
JOBSET = fields(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=METADATA | {"required": ["name"]},
    spec=fields(
        ["replicatedJobs"],
        replicatedJobs=many(
            fields(
                ["name", "template"],
                name=NAME,
                replicas=COUNT,
                template=fields(["spec"], metadata=METADATA, spec=JOB),
            ),
            minItems=1,
        ),
        failurePolicy=fields(
            maxRestarts=COUNT,
            restartStrategy={"enum": ["Recreate", "BlockingRecreate"]},
            rules=many(FAILURE_RULE),
        ),
        ttlSecondsAfterFinished=COUNT,
        suspend={"type": "boolean"},
    ),
)
