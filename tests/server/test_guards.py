"""Who may ask: the Host header on a loopback address, the API key, and addresses that others can reach."""

import shutil
import ssl
import subprocess

import httpx
import openai
import pytest
from harness import say, serving

from isthmus.errors import UsageError
from isthmus.server.options import ServerOptions
from isthmus.server.run import uvicorn_config

KEY = "sk-right"


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory):
    with serving(tmp_path_factory.mktemp("locked"), api_key=KEY) as server:
        yield server


def test_openai_client_with_the_key(locked) -> None:
    answer = locked.client(api_key=KEY).chat.completions.create(model="fake", messages=say("in"))
    assert answer.choices[0].message.content == "in"


@pytest.mark.parametrize("key", ["sk-wrong", "sk-righ", "sk-right2", "x"])
def test_openai_client_with_a_wrong_key(locked, key: str) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        locked.client(api_key=key).chat.completions.create(model="fake", messages=say("out"))
    assert caught.value.code == "invalid_api_key"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([], 401),
        ([("Authorization", f"Bearer {KEY}")], 200),
        ([("Authorization", f"bearer {KEY}")], 200),
        ([("X-Api-Key", KEY)], 200),
        ([("Authorization", KEY)], 401),
        ([("Authorization", f"Basic {KEY}")], 401),
        ([("Authorization", "Bearer")], 401),
        ([("Authorization", f"Bearer {KEY}"), ("Authorization", "Bearer other")], 401),
        ([("Authorization", "Bearer other"), ("X-Api-Key", KEY)], 401),
        ([("Authorization", b"Bearer \xff\xe9")], 401),
        ([("Authorization", "Bearer " + "x" * 60_000)], 401),
    ],
)
def test_headers_that_carry_the_key(locked, headers: list, status: int) -> None:
    assert httpx.get(f"{locked.url}/v1/models", headers=headers).status_code == status


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/chat/completions", "/openapi.json", "/anything", "/health/", "/healthx"]
)
def test_everything_is_behind_the_key(locked, path: str) -> None:
    answer = httpx.get(locked.url + path)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["type"] == "authentication_error"


def test_health_is_open(locked) -> None:
    assert httpx.get(f"{locked.url}/health").json() == {"status": "ok"}


def test_key_in_the_query_is_not_a_key(locked) -> None:
    assert httpx.get(f"{locked.url}/v1/models?api_key={KEY}").status_code == 401


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1234", "127.0.0.1", "127.0.0.1:8080", "[::1]:8080", "[::1]"]
)
def test_host_of_this_machine(server, host: str) -> None:
    assert httpx.get(f"{server.url}/health", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "evil.example:8080", "127.0.0.1.nip.io", ""]
)
def test_host_of_another_is_refused(server, host: str) -> None:
    """A page whose name was pointed at 127.0.0.1 (DNS rebinding) sends its own name as Host."""
    answer = httpx.get(f"{server.url}/v1/models", headers={"Host": host})
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "host_not_allowed"


def test_other_origins_get_no_permission(server) -> None:
    answer = httpx.get(f"{server.url}/v1/models", headers={"Origin": "http://evil.example"})
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "workstation"])
def test_address_that_others_reach_needs_a_key_or_insecure(host: str) -> None:
    with pytest.raises(UsageError, match="--api-key"):
        ServerOptions(host=host)
    assert not ServerOptions(host=host, api_key=KEY).is_loopback
    assert not ServerOptions(host=host, insecure=True).is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_address_of_this_machine_needs_none(host: str) -> None:
    assert ServerOptions(host=host).is_loopback


@pytest.mark.parametrize(
    "options",
    [
        {"port": -1},
        {"port": 65536},
        {"max_queue": -1},
        {"drain_s": float("nan")},
        {"api_key": ""},
        {"api_key": " k"},
    ],
)
def test_options_that_cannot_be_meant(options: dict) -> None:
    with pytest.raises(UsageError):
        ServerOptions(**options)


PAGE = "http://localhost:3000"


@pytest.fixture(scope="module")
def browsed(tmp_path_factory: pytest.TempPathFactory):
    """A server with a key that pages of one origin may call."""
    with serving(tmp_path_factory.mktemp("browsed"), api_key=KEY, cors_origins=(PAGE,)) as server:
        yield server


def preflight(server, origin: str) -> httpx.Response:
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    return httpx.options(f"{server.url}/v1/chat/completions", headers=headers)


def test_page_on_the_list_may_call(browsed) -> None:
    """The preflight needs no key; the request itself does."""
    allowed = preflight(browsed, PAGE)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == PAGE
    answer = httpx.get(f"{browsed.url}/v1/models", headers={"Origin": PAGE, "X-Api-Key": KEY})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
    assert httpx.get(f"{browsed.url}/v1/models", headers={"Origin": PAGE}).status_code == 401


@pytest.mark.parametrize("origin", ["http://evil.example", "http://localhost:3001", "null"])
def test_page_that_is_not_on_the_list_may_not(browsed, origin: str) -> None:
    assert preflight(browsed, origin).status_code == 400
    answer = httpx.get(f"{browsed.url}/v1/models", headers={"Origin": origin, "X-Api-Key": KEY})
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    "origin", ["*", "http://*", "localhost:3000", "http://a/b", "null", "", "http://a@b"]
)
def test_origins_that_cannot_be_meant(origin: str) -> None:
    with pytest.raises(UsageError, match="CORS origin"):
        ServerOptions(cors_origins=(origin,))


def test_tls_needs_both_files_and_readable_ones(tmp_path, server) -> None:
    with pytest.raises(UsageError, match="both"):
        ServerOptions(tls_cert="cert.pem")
    (tmp_path / "x.pem").write_text("no certificate")
    for name in ("x.pem", "missing.pem"):
        options = ServerOptions(tls_cert=str(tmp_path / name), tls_key=str(tmp_path / name))
        with pytest.raises(UsageError, match="--tls-cert"):
            uvicorn_config(server.service, options)


def test_https(tmp_path) -> None:
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert]
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    subprocess.run([*command, *subject], check=True, capture_output=True)
    with serving(tmp_path, tls_cert=cert, tls_key=key) as server:
        trusted = ssl.create_default_context(cafile=cert)
        assert server.url.startswith("https://")
        assert httpx.get(f"{server.url}/health", verify=trusted).json() == {"status": "ok"}


def test_max_model_len_bounds_prompt_and_answer(tmp_path) -> None:
    with serving(tmp_path, max_model_len=20) as server:
        url = f"{server.url}/v1/completions"
        assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["max_model_len"] == 20
        answer = httpx.post(url, json={"prompt": [120] * 18, "max_tokens": 9}).json()
        assert answer["usage"]["completion_tokens"] == 2
        assert answer["choices"][0]["finish_reason"] == "length"
        error = httpx.post(url, json={"prompt": [120] * 20}).json()["error"]
        assert (error["n_prompt_tokens"], error["n_ctx"]) == (20, 20)
