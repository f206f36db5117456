# SPDX-License-Identifier: Apache-2.0
"""TLS towards clients and engines: a router in front of a router, with a certificate of our own."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import re
import ssl
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import aiohttp
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID
from typer.testing import CliRunner

from tests.router.harness import STRICT, deployed, run, until
from vllm_ascend_pd.cli import main
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.router.config import TLS
from vllm_ascend_pd.router.server import RouterServer, bind


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    return make_certificate(tmp_path)


def make_certificate(folder: Path, kind: str = "EC") -> tuple[Path, Path]:
    """Self-signed, for 127.0.0.1; in place of one that is there."""
    key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey = ec.generate_private_key(ec.SECP256R1())
    if kind == "RSA":
        key = rsa.generate_private_key(65537, 2048)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "router")])
    now = datetime.datetime.now(datetime.timezone.utc)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "cert.pem", folder / "key.pem"
    paths[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return paths


# Python 3.10's own TLS transport complains of itself when the other side closes.
@pytest.mark.filterwarnings(
    "ignore:.*_SSLProtocolTransport.__del__:pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize("trusted", [True, False])
def test_https_to_clients_and_to_engines(certificate: tuple[Path, Path], trusted: bool) -> None:
    async def test() -> None:
        chain, key = certificate
        context = ssl.create_default_context(cafile=str(chain))
        async with deployed() as plain:
            # The inner router stands for an engine behind https.
            sock = bind("127.0.0.1", 0)
            engines = plain.server.config
            inner = RouterServer(replace(engines, tls=TLS(chain, key)))
            await inner.start(sock)
            url = f"https://127.0.0.1:{sock.getsockname()[1]}"
            outer_config = replace(
                STRICT,
                prefills=engines.prefills,
                decodes=(url,),
                tls=TLS(chain, key, chain if trusted else None),
            )
            outer_sock = bind("127.0.0.1", 0)
            outer = RouterServer(outer_config)
            await outer.start(outer_sock)
            to_outer = f"https://127.0.0.1:{outer_sock.getsockname()[1]}/v1/completions"
            body = {"prompt": "x", "max_tokens": 3, "stream": True}
            try:
                if trusted:
                    await until(lambda: len(outer.router.prober.models) == 2)
                async with plain.http.post(to_outer, json=body, ssl=context) as response:
                    text = await response.text()
                assert response.status == (200 if trusted else 503), text
                assert text.count('"text"') == (3 if trusted else 0)
            finally:
                await outer.stop()
                await inner.stop()

    run(test)


def test_wrong_certificate_is_a_config_error(tmp_path: Path) -> None:
    from vllm_ascend_pd.router.tls import ServerCertificate, client_context

    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no certificate")
    with pytest.raises(ConfigError, match="--tls-certificate"):
        ServerCertificate(wrong, wrong)
    with pytest.raises(ConfigError, match="--engine-ca"):
        client_context("--engine-ca", wrong)
    with pytest.raises(ConfigError, match="both or none"):
        TLS(certificate=wrong)


def test_plain_client_at_a_tls_port_is_refused(certificate: tuple[Path, Path]) -> None:
    async def test() -> None:
        chain, key = certificate
        async with deployed() as d:
            sock = bind("127.0.0.1", 0)
            server = RouterServer(replace(STRICT, tls=TLS(chain, key)))
            await server.start(sock)
            with pytest.raises(aiohttp.ClientError):
                await d.http.get(f"http://127.0.0.1:{sock.getsockname()[1]}/health")
            await server.stop()

    run(test)


@pytest.mark.parametrize("kind", ["EC", "RSA"])
def test_certificate_that_changes_is_read_again_and_a_broken_one_changes_nothing(
    certificate: tuple[Path, Path], caplog: pytest.LogCaptureFixture, tmp_path: Path, kind: str
) -> None:
    """It was for a key on an elliptic curve, which clients like best."""

    async def test() -> None:
        chain, key = certificate
        sock = bind("127.0.0.1", 0)
        server = RouterServer(replace(STRICT, tls=TLS(chain, key)))
        with patch("vllm_ascend_pd.router.server.REFRESH_S", 0.02):
            await server.start(sock)
        address = sock.getsockname()[:2]

        async def shown() -> str:
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            _, writer = await asyncio.open_connection(*address, ssl=context)
            shown = writer.get_extra_info("ssl_object").getpeercert(True)
            writer.close()
            return ssl.DER_cert_to_PEM_cert(shown)

        try:
            first = chain.read_text()
            assert await shown() == first
            chain.write_text("no certificate")
            await until(lambda: "kept what was read before" in caplog.text)
            assert await shown() == first
            (tmp_path / "new").mkdir()
            new_chain, new_key = make_certificate(tmp_path / "new", kind)
            chain.write_bytes(new_chain.read_bytes())
            # OpenSSL's words for a key of the same kind, and of another one.
            await until(lambda: re.search("MISMATCH|NO_CERTIFICATE", caplog.text) is not None)
            assert await shown() == first
            key.write_bytes(new_key.read_bytes())
            while await shown() != new_chain.read_text():
                await asyncio.sleep(0.02)
        finally:
            await server.stop()

    run(test)


@pytest.mark.slow  # the doctor looks at this host first
@pytest.mark.filterwarnings(
    "ignore:.*_SSLProtocolTransport.__del__:pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize(
    ("words", "answered"),
    [
        (("move", "--list", "--router", "URL"), "REQUEST"),
        (("drain", "D", "--wait", "0", "--router", "URL"), "gets no new requests"),
        (("role", "D", "both", "--router", "URL"), "is used for"),
        (("profile", "URL"), "has no vllm:cache_config_info"),
        (("doctor", "--no-measure", "--router", "URL"), "knows 2 engines"),
    ],
    ids=lambda it: it[0] if isinstance(it, tuple) else "",
)
def test_commands_ask_an_https_router(
    certificate: tuple[Path, Path], words: tuple[str, ...], answered: str, trusted: bool
) -> None:
    async def test() -> None:
        async with deployed() as d:
            sock = bind("127.0.0.1", 0)
            server = RouterServer(replace(d.server.config, tls=TLS(*certificate)))
            await server.start(sock)
            url = f"https://127.0.0.1:{sock.getsockname()[1]}"
            name = f"127.0.0.1:{d.decodes[0].port}"
            typed = [{"URL": url, "D": name}.get(word, word) for word in words]
            typed += ["--ca", str(certificate[0])] if trusted else []
            try:
                await until(lambda: len(server.router.prober.models) == 2)
                said = await asyncio.to_thread(
                    CliRunner().invoke, main.app, typed, env={"COLUMNS": "200"}
                )
            finally:
                await server.stop()
            output = " ".join(said.output.split())
            assert (answered in output) is trusted, output
            assert ("the CA of its certificate with --ca" in output) is not trusted, output

    run(test)
