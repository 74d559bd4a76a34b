"""uvicorn's protocol for httptools, and two things that its protocol for h11 does and this one does not."""

from __future__ import annotations

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# Bytes in a row that are no part of a body: of a head, or of what may stand between and behind chunks. uvicorn's limit with h11.
MAX_HEAD = 64 * 1024


class HttpProtocol(HttpToolsProtocol):
    """Refuses heads that do not end, which would fill the memory, and reads a request with an offer of another protocol as any other.

    Java's HttpClient offers HTTP/2 with each request. httptools takes an offer for accepted: the body is not read, nor what follows on the
    connection. So such a request is read again without its offer, which a server may ignore (RFC 9110, 7.8)."""

    _num_pending = 0
    _has_offer = False

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._num_pending += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            if not self._has_offer:  # CONNECT
                self._refuse()
                return
            version = self.parser.get_http_version().encode()
            lines = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
            head = b"\r\n".join([b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version), *lines, b"\r\n"])
            self.parser = httptools.HttpRequestParser(self)
            self.data_received(head + data[offer.args[0] :])
        except httptools.HttpParserError:
            self._refuse()
        else:
            if self._num_pending > MAX_HEAD:
                self._refuse()

    def _refuse(self) -> None:
        message = "Invalid HTTP request received."
        self.logger.warning(message)
        self.send_400_response(message)

    def on_headers_complete(self) -> None:
        self._num_pending = 0
        self._has_offer = any(name == b"upgrade" for name, _ in self.headers) and self.parser.should_upgrade()
        if not self._has_offer:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_pending = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_pending = 0
        if not self._has_offer:
            super().on_message_complete()
