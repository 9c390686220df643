"""Which keys JobSet, LeaderWorkerSet and the monitors have, for manifests that are not applied.

Written down from their API references: `jobset.x-k8s.io/v1alpha2`, `leaderworkerset.x-k8s.io/v1`
and `monitoring.coreos.com/v1`. The pods and jobs inside are checked by Kubernetes' own schemas.
"""

from __future__ import annotations

from typing import Any

import jsonschema
import kubernetes_validate

VERSION = "1.32"  # of Kubernetes

TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
YES: dict[str, Any] = {"type": "boolean"}
COUNT: dict[str, Any] = {"type": "integer", "minimum": 0}
SHARE: dict[str, Any] = {"type": ["integer", "string"]}
INSIDE: dict[str, Any] = {"type": "object"}  # checked by Kubernetes' schemas


def of(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    """An object with these keys and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def many(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item}


def one_of(*values: str) -> dict[str, Any]:
    return {"enum": list(values)}


def texts() -> dict[str, Any]:
    return {"type": "object", "additionalProperties": {"type": "string"}}


RESTARTS = one_of("Recreate", "BlockingRecreate", "InPlaceRestart")
ACTIONS = one_of(
    "FailJobSet",
    "RestartJobSet",
    "RestartJobSetAndIgnoreMaxRestarts",
    "RestartJob",
    "RestartJobAndIgnoreMaxRestarts",
)
JOB_SET = of(
    replicatedJobs=many(
        of(
            ("name", "template"),
            name=TEXT,
            groupName=TEXT,
            replicas=COUNT,
            template=of(("spec",), metadata=INSIDE, spec=INSIDE),
            dependsOn=many(of(("name", "status"), name=TEXT, status=one_of("Ready", "Complete"))),
        )
    ),
    network=of(enableDNSHostnames=YES, subdomain=TEXT, publishNotReadyAddresses=YES),
    successPolicy=of(("operator",), operator=one_of("All", "Any"), targetReplicatedJobs=many(TEXT)),
    failurePolicy=of(
        maxRestarts=COUNT,
        restartStrategy=RESTARTS,
        rules=many(
            of(
                ("action", "name"),
                name=TEXT,
                action=ACTIONS,
                onJobFailureReasons=many(TEXT),
                onJobFailureMessagePatterns=many(TEXT),
                targetReplicatedJobs=many(TEXT),
            )
        ),
    ),
    startupPolicy=of(("startupPolicyOrder",), startupPolicyOrder=one_of("AnyOrder", "InOrder")),
    suspend=YES,
    coordinator=of(("replicatedJob",), replicatedJob=TEXT, jobIndex=COUNT, podIndex=COUNT),
    managedBy=TEXT,
    ttlSecondsAfterFinished=COUNT,
    volumeClaimPolicies=many(INSIDE),
)
LEADER_WORKER_SET = of(
    ("leaderWorkerTemplate",),
    replicas=COUNT,
    startupPolicy=one_of("LeaderCreated", "LeaderReady"),
    networkConfig=of(("subdomainPolicy",), subdomainPolicy=one_of("Shared", "UniquePerReplica")),
    rolloutStrategy=of(
        ("type",),
        type=one_of("RollingUpdate"),
        rollingUpdateConfiguration=of(partition=COUNT, maxUnavailable=SHARE, maxSurge=SHARE),
    ),
    leaderWorkerTemplate=of(
        ("workerTemplate",),
        leaderTemplate=INSIDE,
        workerTemplate=INSIDE,
        size={"type": "integer", "minimum": 1},
        restartPolicy=one_of(
            "Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"
        ),
        subGroupPolicy=of(
            subGroupPolicyType=one_of("LeaderWorker", "LeaderExcluded"), subGroupSize=COUNT
        ),
        volumeClaimTemplates=many(INSIDE),
        persistentVolumeClaimRetentionPolicy=INSIDE,
    ),
)
SECRET_KEY = of(("key",), name=TEXT, key=TEXT, optional=YES)
SECRET_OR_MAP = of(secret=SECRET_KEY, configMap=SECRET_KEY)
RELABELING = of(
    sourceLabels=many(TEXT),
    separator=TEXT,
    targetLabel=TEXT,
    regex=TEXT,
    modulus=COUNT,
    replacement={"type": "string"},
    action=TEXT,
)
TLS = of(
    ca=SECRET_OR_MAP,
    cert=SECRET_OR_MAP,
    keySecret=SECRET_KEY,
    serverName=TEXT,
    insecureSkipVerify=YES,
    minVersion=TEXT,
    maxVersion=TEXT,
)
SELECTOR = of(
    matchLabels=texts(),
    matchExpressions=many(
        of(
            ("key", "operator"),
            key=TEXT,
            operator=one_of("In", "NotIn", "Exists", "DoesNotExist"),
            values=many({"type": "string"}),
        )
    ),
)
_SCRAPED = {
    "path": TEXT,
    "scheme": one_of("http", "https"),
    "interval": TEXT,
    "scrapeTimeout": TEXT,
    "params": {"type": "object"},
    "honorLabels": YES,
    "honorTimestamps": YES,
    "followRedirects": YES,
    "enableHttp2": YES,
    "filterRunning": YES,
    "tlsConfig": TLS,
    "authorization": of(type=TEXT, credentials=SECRET_KEY),
    "relabelings": many(RELABELING),
    "metricRelabelings": many(RELABELING),
}
_MONITOR = {
    "jobLabel": TEXT,
    "podTargetLabels": many(TEXT),
    "selector": SELECTOR,
    "namespaceSelector": of(any=YES, matchNames=many(TEXT)),
    "sampleLimit": COUNT,
    "targetLimit": COUNT,
    "labelLimit": COUNT,
}
POD_MONITOR = of(
    ("selector",),
    **_MONITOR,
    podMetricsEndpoints=many(of(port=TEXT, portNumber=COUNT, **_SCRAPED)),
)
SERVICE_MONITOR = of(
    ("selector", "endpoints"),
    **_MONITOR,
    targetLabels=many(TEXT),
    endpoints=many(of(port=TEXT, targetPort=TEXT, **_SCRAPED)),
)
KINDS = {
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): JOB_SET,
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): LEADER_WORKER_SET,
    ("monitoring.coreos.com/v1", "PodMonitor"): POD_MONITOR,
    ("monitoring.coreos.com/v1", "ServiceMonitor"): SERVICE_MONITOR,
}


def check(manifest: dict[str, Any]) -> None:
    """Raises ValidationError, of jsonschema or of Kubernetes, for a key that is none."""
    kind = manifest.get("apiVersion", ""), manifest.get("kind", "")
    if kind not in KINDS:
        kubernetes_validate.validate(manifest, VERSION, strict=True)
        return
    whole = of(("metadata", "spec"), apiVersion=TEXT, kind=TEXT, metadata=INSIDE, spec=KINDS[kind])
    jsonschema.validate(manifest, whole)
    kubernetes_validate.validate(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": manifest["metadata"]},
        VERSION,
        strict=True,
    )
    for job in job_templates(manifest):
        inside = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {}, **job}
        kubernetes_validate.validate(inside, VERSION, strict=True)
    for template in pod_templates(manifest):
        inside = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {}, "template": template}
        kubernetes_validate.validate(inside, VERSION, strict=True)


def job_templates(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    return [each["template"] for each in manifest["spec"].get("replicatedJobs", [])]


def pod_templates(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Templates of the pods of a manifest of any kind."""
    spec = manifest.get("spec") or {}
    if "leaderWorkerTemplate" in spec:
        group = spec["leaderWorkerTemplate"]
        return [group[name] for name in ("leaderTemplate", "workerTemplate") if name in group]
    if "replicatedJobs" in spec:
        return [job["spec"]["template"] for job in job_templates(manifest)]
    return [spec["template"]] if "template" in spec else []
