"""Alerts to the operator's webhook: one POST of JSON each, in a thread, so that a slow receiver delays nothing.

    {"run", "kind", "on", "title", "sentence", "at", "round", "node", "name", "page", "text", "content"}

`at` is in seconds since 1970; `text` and `content` say all of it in a line, for receivers of chats that show the
one or the other. What is not taken is tried again, with longer and longer pauses, for `PATIENCE` seconds; what the
receiver refuses is not. Of alerts that wait the oldest give way. The URL may carry a secret: logs name its host
only.
"""

import logging
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable
from http.client import HTTPException
from typing import IO
from urllib.parse import urlsplit

import msgspec

from atoll.comm.errors import ConfigError
from atoll.coordinator.monitor.alerts import Alert

log = logging.getLogger("atoll.coordinator")
TIMEOUT = 10.0  # seconds of a try
PATIENCE = 3600.0  # seconds
FIRST_PAUSE, MAX_PAUSE = 1.0, 60.0  # seconds between two tries
MAX_WAITING = 100  # alerts
TRY_AGAIN = (408, 425, 429)  # and what begins with 5: the receiver may take it later


class Webhook:
    """The operator's webhook; `send` never waits, `close` ends it."""

    def __init__(self, url: str, run: str, page: str, sleep: Callable[[float], object] | None = None) -> None:
        """`page`: URL of the run's page. `sleep`: between two tries. Raises `ConfigError` for no URL of http."""
        self._url, self._run, self._page = checked_url(url), run, page
        self._host = urlsplit(url).hostname or ""
        self._waiting = deque[Alert](maxlen=MAX_WAITING)
        self._news, self._over = threading.Condition(), threading.Event()
        self._sleep = sleep or self._over.wait
        self._opener = urllib.request.build_opener(_NoRedirects)
        self._thread = threading.Thread(target=self._work, name="webhook", daemon=True)
        self._thread.start()

    def send(self, alert: Alert) -> None:
        """Have an alert sent when those before it are."""
        with self._news:
            self._waiting.append(alert)
            self._news.notify()

    def close(self, timeout: float = TIMEOUT) -> None:
        """Send what waits; what cannot be sent in `timeout` seconds is not."""
        deadline = time.monotonic() + timeout
        with self._news:
            self._news.wait_for(lambda: not self._waiting, timeout)
            self._over.set()
            self._news.notify()
        self._thread.join(max(deadline - time.monotonic(), 0.1))

    def _work(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._waiting or self._over.is_set())
                if not self._waiting or self._over.is_set():
                    return
                alert = self._waiting[0]
            self._deliver(alert)
            with self._news:
                if self._waiting and self._waiting[0] is alert:
                    self._waiting.popleft()
                self._news.notify()

    def _deliver(self, alert: Alert) -> None:
        pause, until = FIRST_PAUSE, time.monotonic() + PATIENCE
        while not self._over.is_set():
            if not (why := self._try(alert)):
                return
            if time.monotonic() + pause > until:
                log.warning(f"an alert did not reach the webhook at {self._host} in {PATIENCE:g} s: {why}")
                return
            self._sleep(pause)
            pause = min(2 * pause, MAX_PAUSE)

    def _try(self, alert: Alert) -> str:
        """Post it; returns why it is to be tried again, or nothing."""
        headers = {"Content-Type": "application/json", "User-Agent": "atoll"}
        request = urllib.request.Request(self._url, body(alert, self._run, self._page), headers, method="POST")
        try:
            with self._opener.open(request, timeout=TIMEOUT):
                return ""
        except urllib.error.HTTPError as error:
            if error.code in TRY_AGAIN or error.code >= 500:
                return f"it answers {error.code}"
            log.warning(f"the webhook at {self._host} refuses an alert with {error.code}: is its URL right?")
            return ""
        except (urllib.error.URLError, HTTPException, OSError, ValueError) as error:
            return str(getattr(error, "reason", error))


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would turn the POST into a GET: it is an answer like others that refuse."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: object, newurl: str
    ) -> None:
        return None


def body(alert: Alert, run: str, page: str) -> bytes:
    """The JSON of an alert."""
    line = f"run {run}, round {alert.round}: {alert.title}. {alert.sentence}"
    fields = {
        **{"run": run, "kind": alert.kind, "on": alert.on, "title": alert.title, "sentence": alert.sentence},
        **{"at": alert.at, "round": alert.round, "node": alert.node, "name": alert.name, "page": page},
        **{"text": line, "content": line},
    }
    return msgspec.json.encode(fields)


def checked_url(url: str) -> str:
    """The URL if it is one of http or https. Raises `ConfigError`, in words that do not repeat it."""
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1) > 0:
            return url
    except ValueError:
        pass
    raise ConfigError("--webhook is no URL: give http://HOST/PATH or https://HOST/PATH")
