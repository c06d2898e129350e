"""Certificates for tests of TLS. Examples of Hypothesis have no deadline: that a machine is busy is none of its findings. What
one process compiled need not be compiled by the next."""

import atexit
import os
import shutil
import subprocess
import tempfile

import pytest
from hypothesis import HealthCheck, settings

from common.wire import Tls

if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # before JAX is imported, and for the programs that tests start
    COMPILED = tempfile.mkdtemp(prefix="polyturn-compiled-")
    atexit.register(shutil.rmtree, COMPILED, ignore_errors=True)
    os.environ |= {"JAX_COMPILATION_CACHE_DIR": COMPILED, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}

settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


@pytest.fixture(scope="session")
def certificates(tmp_path_factory):
    """A throw-away authority, a certificate it signed, and one signed by somebody else."""
    if not shutil.which("openssl"):
        pytest.skip("no openssl command")
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    def authority(name):
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        openssl("req", "-x509", *key, "-days", "2", "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem")

    def signed(name, by):
        (folder / "san").write_text("subjectAltName=IP:127.0.0.1")
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        openssl("req", *key, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        ca = ["-CA", f"{by}.pem", "-CAkey", f"{by}.key", "-CAcreateserial", "-days", "2", "-extfile", "san"]
        openssl("x509", "-req", "-in", f"{name}.csr", *ca, "-out", f"{name}.pem")
        return Tls(str(folder / f"{name}.pem"), str(folder / f"{name}.key"), str(folder / "ours.pem"))

    authority("ours")
    authority("theirs")
    return signed("server", "ours"), signed("client", "ours"), signed("stranger", "theirs")
