"""Fetches one file with the hub's own client. Runs in the environment that has the clients, not in Ansible's.

The request is JSON on stdin: `kind`, `endpoint`, `repository`, `revision`, `path`, `folder`. The token comes in
the environment (HF_TOKEN, MODELSCOPE_API_TOKEN), never in the arguments. Nothing that a client says is
believed: whoever called verifies the file.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping


def fetch(request: Mapping[str, str]) -> str:
    """The file's path. Raises whatever the client raises."""
    if request["kind"] == "huggingface":
        from huggingface_hub import hf_hub_download  # type: ignore[import-not-found, unused-ignore]

        return str(
            hf_hub_download(
                request["repository"],
                request["path"],
                revision=request["revision"] or None,
                local_dir=request["folder"],
                endpoint=request["endpoint"],
                token=os.environ.get("HF_TOKEN") or False,
            )
        )
    from modelscope.hub.file_download import (  # type: ignore[import-not-found, unused-ignore]
        model_file_download,
    )

    return str(
        model_file_download(
            request["repository"],
            request["path"],
            revision=request["revision"] or None,
            local_dir=request["folder"],
            endpoint=request["endpoint"],
            token=os.environ.get("MODELSCOPE_API_TOKEN") or None,
        )
    )


if __name__ == "__main__":
    try:
        print(json.dumps({"path": fetch(json.load(sys.stdin))}))
    except Exception as error:
        text = " ".join(str(error).split())
        print(f"{type(error).__name__}: {text[:300]}", file=sys.stderr)
        sys.exit(1)
