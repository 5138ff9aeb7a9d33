"""A Hugging Face hub on this machine: the requests that creating a repository and uploading a folder make.

Written from the requests of huggingface_hub 2.4: repos/create, models/NAME, validate-yaml, preupload, LFS batch and
upload, commit. Bytes of large files are checked against their SHA-256, as the hub does.
"""

import base64
import hashlib
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml
from storage.s3_server import body_of

TOKEN = "hf_" + "a" * 34


class Hub(ThreadingHTTPServer):
    """Repositories of the owner `me`, who has `TOKEN`; nobody may write elsewhere.

    Attributes:
        private: by name of repository.
        files: bytes by repository and path, of committed files.
        fails_at: part of a path whose requests are answered with status 500.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Answer)
        self.private: dict[str, bool] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.objects: dict[str, bytes] = {}
        self.fails_at: str | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Answer(BaseHTTPRequestHandler):
    server: Hub  # type: ignore[assignment]
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """No log."""

    def _send(self, value: Any, status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _is_allowed(self) -> bool:
        if self.server.fails_at is not None and self.server.fails_at in self.path:
            self._send({"error": "planted fault"}, 500)
        elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._send({"error": "Invalid username or password."}, 401)
        else:
            return True
        return False

    def do_GET(self) -> None:
        name = self.path.removeprefix("/api/models/").partition("?")[0]
        if not self._is_allowed():
            return
        if name in self.server.private:
            self._send({"id": name, "private": self.server.private[name], "siblings": []})
        else:
            self._send({"error": f"not found: {self.path}"}, 404)

    def do_PUT(self) -> None:
        data = body_of(self)
        oid = self.path.rpartition("/")[2]
        if self.server.fails_at is not None and self.server.fails_at in self.path:
            self._send({"error": "planted fault"}, 403)
        elif hashlib.sha256(data).hexdigest() == oid:
            self.server.objects[oid] = data
            self._send({})
        else:
            self._send({"error": "these are not the bytes of this object"}, 400)

    def do_POST(self) -> None:
        data = body_of(self)
        if not self._is_allowed():
            return
        path = self.path.partition("?")[0]
        if path == "/api/repos/create":
            self._create(json.loads(data))
        elif path == "/api/validate-yaml":
            yaml.safe_load(json.loads(data)["content"].split("---")[1])
            self._send({"errors": [], "warnings": []})
        elif path.endswith("/preupload/main"):
            files = [
                {"path": file["path"], "uploadMode": "lfs" if "safetensors" in file["path"] else "regular"}
                for file in json.loads(data)["files"]
            ]
            self._send({"files": [file | {"shouldIgnore": False} for file in files]})
        elif path.endswith(".git/info/lfs/objects/batch"):
            objects = json.loads(data)["objects"]
            upload = [{**o, "actions": {"upload": {"href": f"{self.server.url}/lfs/{o['oid']}"}}} for o in objects]
            self._send({"transfer": "basic", "objects": upload})
        elif path.endswith("/commit/main"):
            self._commit(path.removeprefix("/api/models/").removesuffix("/commit/main"), data)
        else:
            self._send({"error": f"not found: {path}"}, 404)

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        if not name.startswith("me/"):
            self._send({"error": f"You don't have the rights to create a model under {name}"}, 403)
        elif name in self.server.private:
            self._send({"error": "You already created this model repo", "url": f"{self.server.url}/{name}"}, 409)
        else:
            self.server.private[name] = asked.get("visibility") == "private"
            self._send({"url": f"{self.server.url}/{name}", "name": name})

    def _commit(self, name: str, data: bytes) -> None:
        committed = self.server.files.setdefault(name, {})
        for line in map(json.loads, data.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                committed[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                committed[value["path"]] = self.server.objects[value["oid"]]
        self._send({"commitUrl": f"{self.server.url}/{name}/commit/{'0' * 40}", "commitOid": "0" * 40, "success": True})
