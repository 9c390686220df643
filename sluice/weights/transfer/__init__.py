"""Weights from a trainer's ranks to engines over collectives, past the store.

The trainer's front publishes a version to the store, then sends it to the engines at hand:

1. `OpenTransferCommand`: every rank that owns tensors (a *sender*) listens with a torch
   `TCPStore` and says at which host:port.
2. `JoinTransferGroup` on every engine: one process group for each sender, in the order of the
   request. The sender is rank 0, an engine has `transfer_rank_count` ranks from `first_rank` on.
   The group is what SGLang's `init_weights_update_group` makes: keys below
   `PrefixStore(group)`, `_new_process_group_helper` with the backend's name and no default group.
3. `SendWeightsCommand` on the ranks and `PrepareWeights` with `transfer` on the engines, at the
   same time. Sender after sender in the order in which they were joined, each broadcasts its
   *buckets* from rank 0: one `broadcast` of a flat uint8 tensor a bucket, and nothing else. No
   names travel: both sides compute the same list with `plan.plan_buckets` from the manifest of
   the version in the store, the names of the files that the sender owns, and `bucket_bytes`.

A bucket is a run of whole tensors of one shard file, in the order of its bytes there (wide dtypes
first, then by name, so that all are aligned): at most `bucket_bytes`, or one larger tensor. Its
bytes are those of the tensors in their published dtype, row-major, little-endian, without gaps:
what SGLang takes as `load_format="flattened_bucket"` with the names, dtypes and shapes of the
bucket. Tensors without elements are in no broadcast.

The receiver digests every tensor (xxh3-128) and compares it with the manifest before the version
counts as prepared. Who cannot check first, since its engine loads into the serving weights, stays
paused until it has checked, and goes back to a version of the store if they differ.

Every wait has the deadline of the request. A member that dies or stalls breaks its groups for
all; the front then makes new ones without it, and the engine left out catches up from the store.
"""
