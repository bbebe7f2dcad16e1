"""Who may ask: token, TLS, other web pages; and what the command says of its options."""

import http.client
import json
import shutil
import ssl
import subprocess
import sys
from types import SimpleNamespace

import pytest
from server_process import serving

pytest.importorskip("starlette", reason="the extra [serve] is not installed")
TOKEN = "0123456789abcdef-for-tests"
ONE = ("--threads", "1")
PATHS = [
    ("GET", "/v2"),
    ("GET", "/v2/health/live"),
    ("GET", "/v2/health/ready"),
    ("GET", "/v2/models/line"),
    ("GET", "/v2/models/line/ready"),
    ("POST", "/v2/models/line/infer"),
    ("POST", "/v2/repository/index"),
    ("POST", "/v2/repository/models/line/load"),
    ("POST", "/inspect"),
    ("GET", "/metrics"),
    ("GET", "/live"),
    ("GET", "/live/line"),
    ("GET", "/live/line/1/heat.png"),
    ("GET", "/nothing/here"),
    ("OPTIONS", "/inspect"),
    ("HEAD", "/v2"),
]
WRONG = [
    {},
    {"Authorization": "Bearer"},
    {"Authorization": "Bearer " + TOKEN[:-1]},
    {"Authorization": "Bearer " + TOKEN + "x"},
    {"Authorization": "Basic " + TOKEN},
    {"Authorization": TOKEN},
    {"X-Token": TOKEN},
]


@pytest.fixture(scope="module")
def guarded(line_bundle):
    with serving([line_bundle], *ONE, environment={"MDPS_TOKEN": f"{TOKEN}\n"}) as running:
        yield running


@pytest.fixture(scope="module")
def open_server(line_bundle):
    with serving([line_bundle], *ONE) as running:
        yield running


def ask(port, method, path, body=None, context=None, **headers):
    """(status, headers, body) with exactly the headers given."""
    kind = http.client.HTTPConnection if context is None else http.client.HTTPSConnection
    more = {} if context is None else {"context": context}
    connection = kind("127.0.0.1", port, timeout=30, **more)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        reply = connection.getresponse()
        return reply.status, dict(reply.getheaders()), reply.read()
    finally:
        connection.close()


@pytest.mark.parametrize(("method", "path"), PATHS, ids=[f"{m} {p}" for m, p in PATHS])
def test_nothing_is_answered_without_the_token(guarded, line_images, method, path):
    body = line_images[0] if method == "POST" else None
    for headers in WRONG:
        status, replied, content = ask(guarded.port, method, path, body, **headers)
        assert status == 401
        assert replied["www-authenticate"] == "Bearer"
        assert method == "HEAD" or set(json.loads(content)) == {"error"}
        assert b"line" not in content


def test_only_the_very_token_opens_the_door():
    from starlette.datastructures import Headers
    from starlette.responses import Response

    from mdps.serving.http.guard import Guard
    from mdps.serving.http.refusals import Refusal

    options = SimpleNamespace(token=TOKEN, open_health=False)
    guard = Guard(None, SimpleNamespace(options=options), Response())
    scope = {"path": "/inspect", "method": "POST"}
    guard._check_token(scope, Headers({"authorization": f"Bearer {TOKEN}"}))
    for headers in (*WRONG, {"Authorization": "Bearer " + "x" * len(TOKEN)}):
        with pytest.raises(Refusal, match="wants its token"):
            guard._check_token(scope, Headers(headers))


def test_a_refusal_reaches_a_client_that_sends_a_large_body_first(guarded):
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    large = bytes(8 * 2**20)
    assert ask(guarded.port, "POST", "/inspect", large)[0] == 401
    assert ask(guarded.port, "PUT", "/inspect", large, **bearer)[0] == 405
    assert ask(guarded.port, "POST", "/nothing", large, **bearer)[0] == 404
    assert ask(guarded.port, "POST", "/inspect", 3 * large, **bearer)[0] == 413
    assert ask(guarded.port, "POST", "/inspect?map=exe", large, **bearer)[0] == 400


def test_the_page_without_the_token_is_a_401_that_holds_no_data(guarded):
    status, _, content = ask(guarded.port, "GET", "/")
    assert status == 401
    assert b"This server wants its token" in content
    assert b"3." not in content.split(b"<body>")[1].split(b"<script>")[0]  # no score, no threshold


def test_with_the_token_all_is_answered(guarded, line_images):
    status, _, content = ask(guarded.port, "POST", "/inspect", line_images[0], Authorization=f"Bearer {TOKEN}")
    assert status == 200
    assert json.loads(content)["verdict"] in ("pass", "fail")
    assert ask(guarded.port, "GET", "/", Authorization=f"bearer {TOKEN}")[0] == 200


def test_the_token_is_in_no_log_and_refusals_are_counted(guarded):
    ask(guarded.port, "GET", "/v2", Authorization=f"Bearer {TOKEN}x")
    content = ask(guarded.port, "GET", "/metrics", Authorization=f"Bearer {TOKEN}")[2].decode()
    assert 'mdps_errors_total{kind="unauthorized"}' in content
    assert TOKEN not in "\n".join(guarded.lines)


def test_health_can_be_left_open_and_tls_is_spoken(line_bundle, line_images, tmp_path):
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl makes the certificate of this test and is not installed")
    cert, key, token = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "token"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, *subject],
        check=True, capture_output=True,
    )  # fmt: skip
    token.write_text(TOKEN + "\n")
    options = ("--tls-cert", str(cert), "--tls-key", str(key), "--token-file", str(token), "--open-health")
    with serving([line_bundle], *ONE, *options) as server:
        context = ssl.create_default_context(cafile=cert)
        assert server.url.startswith("https://")
        assert ask(server.port, "GET", "/v2/health/ready", context=context)[0] == 200
        assert ask(server.port, "GET", "/v2", context=context)[0] == 401
        bearer = {"Authorization": f"Bearer {TOKEN}"}
        assert ask(server.port, "POST", "/inspect", line_images[0], context=context, **bearer)[0] == 200
        with pytest.raises((OSError, http.client.HTTPException)):
            ask(server.port, "GET", "/v2/health/ready")


def test_an_encrypted_key_is_refused_and_not_asked_for(line_bundle, tmp_path):
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl makes the certificate of this test and is not installed")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = ["-keyout", key, "-out", cert, "-subj", "/CN=localhost", "-days", "2", "-passout", "pass:secret"]
    subprocess.run([openssl, "req", "-x509", "-newkey", "rsa:2048", *made], check=True, capture_output=True)
    code, said = command(line_bundle, "--port", "0", "--tls-cert", cert, "--tls-key", key)
    assert code == 2
    assert "--tls-key" in said
    assert "pass phrase" not in said


def test_another_web_page_can_neither_send_nor_read(open_server, line_images):
    port = open_server.port
    assert ask(port, "POST", "/inspect", line_images[0], Origin="http://evil.example")[0] == 403
    assert ask(port, "POST", "/inspect", line_images[0], Origin="null")[0] == 403
    assert ask(port, "POST", "/inspect", line_images[0], Origin=f"http://127.0.0.1:{port}")[0] == 200
    assert ask(port, "GET", "/live/line", Host=f"rebound.example:{port}")[0] == 421
    for host in (f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}", "10.0.0.7"):
        assert ask(port, "GET", "/live/line", Host=host)[0] == 200
    replied = ask(port, "GET", "/v2")[1]
    assert "access-control-allow-origin" not in {name.lower() for name in replied}
    assert replied["cross-origin-resource-policy"] == "same-origin"


def test_the_page_may_load_nothing_from_elsewhere(open_server):
    _, headers, content = ask(open_server.port, "GET", "/")
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert b"http://" not in content.replace(b"http://www.w3.org/2000/svg", b"")
    assert b"https://" not in content


def command(*arguments, environment=None):
    done = subprocess.run(
        [sys.executable, "-m", "mdps.cli", "serve", *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=120, env=environment,
    )  # fmt: skip
    return done.returncode, done.stderr


def test_mistakes_end_as_a_sentence_with_code_2(line_bundle, tmp_path, open_server):
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "umlaut").write_text("pässwörter-sind-lang", encoding="utf-8")
    cases = [
        ((tmp_path / "nothing",), "is no bundle"),
        ((line_bundle, line_bundle), "tell them apart as NAME=BUNDLE"),
        ((f"a/b={line_bundle}",), "give a plain name"),
        ((line_bundle, "--tls-cert", "cert.pem"), "belong together"),
        ((line_bundle, "--tls-cert", tmp_path / "no", "--tls-key", tmp_path / "no", "--port", "0"), "--tls-cert"),
        ((line_bundle, "--token-file", tmp_path / "no"), "cannot be read"),
        ((line_bundle, "--token-file", tmp_path / "empty"), "the token is empty"),
        ((line_bundle, "--token-file", tmp_path / "umlaut"), "printable ASCII"),
        ((line_bundle, "--port", open_server.port), "is in use"),
        ((line_bundle, "--host", "203.0.113.77", "--port", "0"), "203.0.113.77"),
        ((line_bundle, "--product", "blue", "--port", "0"), "no calibration for the product 'blue'"),
    ]
    for arguments, sentence in cases:
        code, said = command(*arguments)
        assert code == 2, (arguments, said)
        assert sentence in said, (arguments, said)
        assert "Traceback" not in said


def test_listening_to_others_without_a_token_is_warned_of(line_bundle):
    with serving([line_bundle], *ONE, "--host", "0.0.0.0") as server:
        assert any(line.startswith("Warning: whoever reaches 0.0.0.0") for line in server.lines)
