"""A service with made answers, for what the real one is hard to bring to: each state, refusals, hostile names."""

import hashlib
import io
import json
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from email import message_from_bytes
from email.policy import HTTP
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from PIL import Image

from idml.search.reranking import NOTE

STATIC = Path(__file__).resolve().parents[2] / "src/idml/server/static"
TYPES = {".html": "text/html; charset=utf-8", ".js": "text/javascript", ".css": "text/css"}
POLICY = (
    "default-src 'self'; img-src 'self' blob: data:; object-src 'none'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'"
)
HOSTILE = "<img src=x onerror=\"document.title='broken in'\"><b>bold</b>"
ERRORS = {0.01: None, 0.02: None, 0.05: 0.62, 0.1: 0.81, 0.2: 0.93, 0.5: 1.0}  # max_error: coverage, None: impossible
STATES = {
    "match": ("match", "clear match", 0.974),
    "unsure": ("unsure", "two classes tie", 0.41),
    "novel": ("not in the collection", "far from everything", 0.03),
}


def png(word: str, side: int = 48) -> bytes:
    """A picture whose colour follows from a word."""
    file = io.BytesIO()
    Image.new("RGB", (side, side), tuple(hashlib.sha256(word.encode()).digest()[:3])).save(file, "PNG")
    return file.getvalue()


def made_items(n: int = 40) -> list[dict]:
    labels = ["gull", "tern", "heron", None, HOSTILE]
    return [
        {"id": f"{i:032x}", "path": f"birds/{i:03d}.png", "label": labels[i % 5], "level": round(0.1 * (i % 17), 3)}
        for i in range(n)
    ]


@dataclass
class Asked:
    """One request that came in."""

    method: str
    path: str
    query: dict[str, str]
    key: str | None
    fields: dict[str, tuple[str | None, bytes]] = field(default_factory=dict)


class StandIn:
    """The service; what it says can be set before and during a test."""

    def __init__(self) -> None:
        self.items = made_items()
        self.calibrated, self.writable, self.drift, self.level_speaks = True, True, "", True
        self.void = ""  # why answers are not promised, if the state of the gallery does not say so yet
        self.mapped = False  # position maps are stored
        self.later: dict = {}  # further facts about the gallery
        self.feedback: list[dict] = []
        self.drawing = 0  # how many requests for the map are told to wait
        self.key: str | None = None
        self.refuse: dict[str, tuple[int, str]] = {}  # "METHOD path": status, reason
        self.wait = 0.0  # seconds before an answer to a search
        self.asked: list[Asked] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"service": self}))
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def requests(self, method: str, path: str) -> list[Asked]:
        return [asked for asked in self.asked if asked.method == method and asked.path == path]

    def item(self, id: str) -> dict | None:
        return next((item for item in self.items if item["id"] == id), None)

    def gallery(self) -> dict:
        labels = [item["label"] for item in self.items if item["label"] is not None]
        reason = (
            "cannot promise at most {} % wrong matches here: there are 100 calibration queries, at least 384 are needed"
        )
        promises = [
            {
                "max_error": error,
                "confidence": 0.9,
                "possible": coverage is not None,
                "threshold": None if coverage is None else 0.9,
                "coverage": coverage or 0.0,
                "approximate": False,
                "reason": "" if coverage else reason.format(round(100 * error)),
            }
            for error, coverage in ERRORS.items()
        ]
        counts = {"name": "Sea birds", "items": len(self.items), "labelled": len(labels), "classes": len(set(labels))}
        told = {"model": "0123456789abcdef", "calibrated": self.calibrated, "drift": self.drift, "growth": ""}
        told["unknown_share"] = 0.25 if self.calibrated else None
        told |= {"recognised": 0.574 if self.calibrated else None, "rejected": 0.048 if self.calibrated else None}
        told |= {"level_speaks": self.level_speaks, "writable": self.writable, "queries": "its images, each left out"}
        told["rerankers"] = ["diml"] if self.mapped else []
        return {
            **counts,
            **told,
            "promises": promises if self.calibrated else [],
            **self.later,
            "feedback": len(self.feedback) if self.later.get("feedback") is not None else None,
        }

    def page(self, order: str, label: str, start: int, size: int) -> dict:
        """A page of items; mixed is backwards here."""
        ways = {"added": self.items, "mixed": self.items[::-1]}
        items = ways.get(order) or sorted(self.items, key=lambda item: -item["level"])
        wanted = [item for item in items if not label or item["label"] == label]
        return {"total": len(wanted), "items": wanted[start : start + size]}

    def labels(self, text: str, size: int) -> dict:
        counts = Counter(item["label"] for item in self.items if item["label"] is not None)
        found = sorted(label for label in counts if text.lower() in label.lower())
        return {"total": len(found), "labels": [{"label": label, "items": counts[label]} for label in found[:size]]}

    def reply(self, name: str, max_error: float, without: str = "", rerank: str | None = None) -> dict:
        state, reason, chance = next((told for word, told in STATES.items() if word in name), STATES["match"])
        if ERRORS.get(max_error) is None and state == "match" and self.calibrated:
            state, reason = "unsure", f"cannot promise at most {100 * max_error:g} % wrong matches here"
        results = [
            {
                **item,
                "distance": 0.1 + 0.05 * i,
                "probability": max(0.004, 0.997 - 0.09 * i) if self.calibrated else None,
                "duplicates": [other["id"] for other in self.items[20:23]] if i == 0 else [],
            }
            for i, item in enumerate([item for item in self.items if item["id"] != without][:12])
        ]
        if rerank is not None:
            results = [{**result, "probability": None} for result in results[::-1]]
            chance = None
        return {
            "state": state,
            "reason": reason if self.calibrated else f"{reason} (uncalibrated)",
            "probability": chance if self.calibrated else None,
            "novelty": 0.02 if state == "not in the collection" else 0.4,
            "calibrated": self.calibrated and rerank is None,
            "promised": rerank is None
            and self.calibrated
            and not (self.drift or self.void)
            and ERRORS.get(max_error) is not None,
            "level": 0.7,
            "set_size": None,
            "results": results,
            "notes": [
                "8 of 40 images have no label",
                *(note for note in (self.drift, self.void) if note),
                *([NOTE.format(rerank)] if rerank else []),
            ],
            "took_ms": 12.3,
        }

    def points(self) -> list[dict]:
        """Items on a grid of five columns, 1 apart; y grows upwards."""
        shown = ({key: item[key] for key in ("id", "label", "level")} for item in self.items)
        return [{**item, "x": i % 5, "y": -(i // 5)} for i, item in enumerate(shown)]


class _Handler(BaseHTTPRequestHandler):
    service: StandIn
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _send(self, status: int, body: bytes = b"", kind: str = "application/json") -> None:
        self.send_response(status)
        if status == 202:
            self.send_header("Retry-After", "0.05")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        with suppress(BrokenPipeError, ConnectionResetError):  # the page may have given up waiting
            self.end_headers()
            self.wfile.write(body)

    def _json(self, content: object, status: int = 200) -> None:
        self._send(status, json.dumps(content).encode())

    def _handle(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        asked = Asked(self.command, unquote(url.path), query, self.headers.get("X-API-Key"))
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        kind = self.headers.get("Content-Type", "")
        if kind.startswith("multipart/"):
            message = message_from_bytes(f"Content-Type: {kind}\r\n\r\n".encode() + body, policy=HTTP)
            for part in message.iter_parts():
                name = part.get_param("name", header="content-disposition")
                asked.fields[name] = (part.get_filename(), part.get_payload(decode=True))
        elif body:
            asked.fields["json"] = (None, body)
        self.service.asked.append(asked)
        pages = {"/": "index.html", "/docs": "docs.html"}
        file = STATIC / pages.get(asked.path, asked.path.removeprefix("/static/"))
        if (asked.path in pages or asked.path.startswith("/static/")) and file.is_file():
            self._send(200, file.read_bytes(), TYPES[file.suffix])
        elif self.service.key and asked.key != self.service.key:
            self._json({"error": "this key is not known" if asked.key else "a key is needed"}, 401)
        elif refusal := self.service.refuse.get(f"{asked.method} {asked.path}"):
            self._json({"error": refusal[1]}, refusal[0])
        else:
            self._answer(asked)

    do_GET = do_POST = do_PATCH = do_DELETE = _handle

    def _answer(self, asked: Asked) -> None:
        service = self.service
        match asked.method, asked.path.split("/")[1:]:
            case "GET", ["api", "gallery"]:
                self._json(service.gallery())
            case "GET", ["api", "feedback"]:
                self._json({"feedback": service.feedback})
            case "POST", ["api", "feedback"]:
                right, (_, label) = asked.fields["verdict"][1] == b"right", asked.fields.get("label", (None, None))
                told = "gull" if right else label and label.decode()
                name = asked.fields["image"][0]
                service.feedback.append({"id": name, "query": name, "right": right, "found": "gull", "label": told})
                self._json(service.feedback[-1], 201)
            case "DELETE", ["api", "feedback", id]:
                service.feedback = [each for each in service.feedback if each["id"] != id]
                self._send(204)
            case "GET", ["api", "map"]:
                service.drawing -= 1
                self._json(*(({"points": service.points()},) if service.drawing < 0 else ({"status": "drawing"}, 202)))
            case "POST", ["api", "search"]:
                time.sleep(service.wait)
                name = asked.fields["image"][0] or ""
                told = service.reply(name, float(asked.query.get("max_error", 0.05)), rerank=asked.query.get("rerank"))
                self._json(told)
            case "GET", ["api", "items"]:
                start, size = int(asked.query.get("offset", 0)), int(asked.query["limit"])
                self._json(service.page(asked.query["order"], asked.query.get("label", ""), start, size))
            case "GET", ["api", "labels"]:
                self._json(service.labels(asked.query.get("text", ""), int(asked.query["limit"])))
            case "POST", ["api", "items"]:
                label = asked.fields["label"][1].decode() if "label" in asked.fields else None
                id = hashlib.sha256(asked.fields["image"][1]).hexdigest()[:32]
                new = service.item(id) is None
                if new:
                    service.items.insert(0, {"id": id, "path": f"uploads/{id}.png", "label": label, "level": 0.2})
                self._json({"id": id, "new": new}, 201)
            case _, ["api", "items", id, *rest] if (item := service.item(id)) is not None:
                self._item(asked, item, rest)
            case _:
                self._json({"error": "there is no such thing"}, 404)

    def _item(self, asked: Asked, item: dict, rest: list[str]) -> None:
        if asked.method == "PATCH":
            item["label"] = json.loads(asked.fields["json"][1])["label"]
            self._json(item)
        elif asked.method == "DELETE":
            self.service.items.remove(item)
            self._send(204)
        elif rest == ["similar"]:
            error, rerank = float(asked.query.get("max_error", 0.05)), asked.query.get("rerank")
            self._json(self.service.reply("match", error, item["id"], rerank))
        elif rest:
            self._send(200, png(item["id"], 300 if rest == ["image"] else 96), "image/png")
        else:
            self._json(item)
