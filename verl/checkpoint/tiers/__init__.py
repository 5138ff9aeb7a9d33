"""Checkpoints in object storage, behind the local disk.

    PREFIX/
      log/000000000001.json        claims of trainers and checkpoints, in order; created once, never replaced
      manifests/<digest>.json      manifests of checkpoints, by their own digest
      objects/<digest>-<size>      files of checkpoints, by content: what checkpoints share is there once

A checkpoint is there once its record in the log is, which is created, under the next free number, after everything
that it names. Of two trainers that write the same number one succeeds; the other one reads what the first has written.

    log.py            the log: reading, appending, claims and fencing
    remote.py         RemoteCheckpoints: which are whole, which is the newest, what they hold; reads by ranges
    push.py           one checkpoint from a directory into the store
    pull.py           one checkpoint from the store into a directory
    uploader.py       the process that uploads while training goes on, as the trainer sees it
    upload_process.py the same from inside
    resuming.py       the newest complete checkpoint of any tier
"""
