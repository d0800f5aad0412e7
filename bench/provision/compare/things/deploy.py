# type: ignore
"""The same things as operations of pyinfra, each of the kind that its documentation names for it.

Run by pyinfra itself, in an environment of its own: `THINGS` names a JSON file with what all hosts have in common.
"""

import io
import json
import os
from pathlib import Path

from pyinfra import host
from pyinfra.operations import files, server

given = json.loads(Path(os.environ["THINGS"]).read_text(encoding="utf-8"))
values = {**given["values"], "node": host.name}
templates = Path(given["templates"])

for thing in given["things"]:
    kind, path, name = thing["kind"], thing["path"], f"{thing['kind']} {thing.get('line', thing['path'])}"
    rights = {"user": thing["owner"], "group": thing["group"], "mode": thing["mode"].lstrip("0")}
    if kind == "account":
        server.group(name=f"group {path}", group=path, system=True)
        server.user(
            name=f"user {path}",
            user=path,
            group=path,
            system=True,
            create_home=False,
            ensure_home=False,
            home="/nonexistent",
            shell="/usr/sbin/nologin",
        )
    elif kind == "folder":
        files.directory(name=name, path=path, **rights)
    elif kind == "file" and thing.get("source"):
        source = str(templates / thing["source"])
        options = {"trim_blocks": True}
        files.template(name=name, src=source, dest=path, jinja_env_kwargs=options, **rights, **values)
    elif kind == "file":
        files.put(name=name, src=io.StringIO(thing["content"]), dest=path, **rights)
    elif kind == "link":
        files.link(name=name, path=path, target=thing["target"])
    elif kind == "line":
        files.line(name=name, path=path, line=f"^{thing['key']}.*", replace=thing["line"])
    elif kind == "absent":
        files.file(name=name, path=path, present=False)
    elif kind == "weight":
        # openssl: on Debian 12 several times as fast as sha256sum.
        check = f"openssl dgst -sha256 -r {path} | grep -q ^{thing['sha256']}"
        server.shell(name=name, commands=[check])
