"""Small HTTP servers for tests, on a free port of this machine.

    start(Handler)                 a server, a thread a request; its address is .url
    stop(server)                   a second time does nothing
    Quiet                          what a Handler is made from: no log on stderr
    start_openai(script, pages)    an OpenAI-like server, its address in .url, /v1 included. `script(prompt, number of the request)` answers a POST: JSON,
                                   (status, text) or 'close'; the prompt is the last turn's text, or a tuple of ids. `pages` answers a GET: {path: JSON
                                   or a function that gives text}. It counts: .paths and .bodies of the POSTs, .tries of each prompt, the most under way
"""
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def start(handler, **values):
    """`values`: attributes of the server, for the handler to find."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.url = f"http://127.0.0.1:{server.server_port}"
    vars(server).update(values)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return server


def stop(server):
    server.shutdown()
    server.server_close()


class Quiet(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass


def start_openai(script=None, pages={}):
    server = start(OpenAI, script=script, pages=pages, lock=threading.Lock(), paths=[], bodies=[], tries={}, under_way=0, most=0)
    server.url += "/v1"
    return server


class OpenAI(Quiet):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        page = self.server.pages.get(self.path)
        self.answer(*((404, "nothing here") if page is None else (200, page() if callable(page) else json.dumps(page))))

    def do_POST(self):
        body, server = json.loads(self.rfile.read(int(self.headers["Content-Length"]))), self.server
        prompt = body["messages"][-1]["content"] if "messages" in body else tuple(body["prompt"])
        with server.lock:
            server.paths.append(self.path)
            server.bodies.append(body)
            server.tries[prompt] = server.tries.get(prompt, 0) + 1
            server.under_way += 1
            server.most = max(server.most, server.under_way)
            number = len(server.bodies)
        try:
            given = server.script(prompt, number)
        finally:
            with server.lock:
                server.under_way -= 1
        if given == "close":                           # before a word is said
            self.close_connection = True
        else:
            self.answer(*(given if isinstance(given, tuple) else (200, json.dumps(given))))

    def answer(self, code, text):
        try:
            self.send_response(code)
            self.send_header("Content-Length", str(len(text) + 1000 * text.startswith("cut")))
            self.end_headers()
            self.wfile.write(text.encode())
        except OSError:                                # the client did not wait
            pass
        self.close_connection = True
