"""Let a CUDA build of torch load on a machine without CUDA.

PyPI's torch for x86-64 names CUDA libraries that come in 2 GB of other packages. Nothing of them
is called where no GPU is used, but the loader wants the files, the version nodes and the symbols.
This writes, beside torch's own libraries, one small library for each that is missing, whose
functions all answer 100 (`cudaErrorNoDevice`), so that `torch.cuda.is_available()` is false.
"""

import subprocess
import sys
import sysconfig
import tempfile
from collections import defaultdict
from pathlib import Path

from elftools.elf.elffile import ELFFile

GIVEN = ("libc.", "libm.", "libdl.", "librt.", "libpthread.", "libstdc++.", "libgcc_s.", "ld-linux")
"""Libraries of the system, which need no stub."""

UNVERSIONED = ""
Symbols = dict[str, set[str]]
"""Names by version node."""


def text_functions(name: str) -> bool:
    """Whether callers print what the function returns."""
    return name.endswith(("ErrorString", "ErrorName", "StatusString", "LastError", "StatusName"))


def read(path: Path, wanted: dict[str, Symbols], loose: set[str], defined: set[str]) -> None:
    """Note what one library asks of others, and what it defines."""
    with path.open("rb") as file:
        elf = ELFFile(file)
        dynamic, symbols = elf.get_section_by_name(".dynamic"), elf.get_section_by_name(".dynsym")
        if dynamic is None or symbols is None:
            return
        for tag in dynamic.iter_tags():
            if tag.entry.d_tag == "DT_NEEDED" and not tag.needed.startswith(GIVEN):
                wanted.setdefault(tag.needed, defaultdict(set))
        nodes: dict[int, tuple[str, str]] = {}
        if needs := elf.get_section_by_name(".gnu.version_r"):
            for library, versions in needs.iter_versions():
                for version in versions:
                    nodes[version.entry.vna_other] = (library.name, version.name)
        indices = elf.get_section_by_name(".gnu.version")
        for number, symbol in enumerate(symbols.iter_symbols()):
            if symbol.entry.st_shndx != "SHN_UNDEF":
                defined.add(symbol.name)
                continue
            index = indices.get_symbol(number).entry.ndx if indices else None
            if index in nodes:
                library, version = nodes[index]
                if library in wanted:
                    wanted[library][version].add(symbol.name)
            elif symbol.entry.st_info.bind == "STB_GLOBAL" and symbol.name:
                loose.add(symbol.name)
        for library, version in nodes.values():
            if library in wanted:
                wanted[library][version]  # a node is wanted even if no symbol is


def build(folder: Path, library: str, symbols: Symbols) -> None:
    """Compile the stub of one library."""
    with tempfile.TemporaryDirectory() as scratch:
        source, script = Path(scratch, "stub.c"), Path(scratch, "stub.map")
        names = sorted(set().union(*symbols.values()))
        source.write_text(
            "".join(
                f'const char *{name}(void) {{ return "no CUDA here"; }}\n'
                if text_functions(name)
                else f"long {name}(void) {{ return 100; }}\n"
                for name in names
            )
        )
        command = ["cc", "-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{library}"]
        if nodes := {version: found for version, found in symbols.items() if version}:
            script.write_text(
                "".join(
                    f"{version} {{ global: {''.join(f'{n}; ' for n in sorted(found))}}};\n"
                    for version, found in nodes.items()
                )
            )
            command.append(f"-Wl,--version-script={script}")
        subprocess.run([*command, "-o", str(folder / library), str(source)], check=True)


def main() -> None:
    """Write the stubs that the torch of this environment needs."""
    folder = Path(sysconfig.get_path("purelib"), "torch", "lib")
    wanted: dict[str, Symbols] = {}
    loose: set[str] = set()
    defined: set[str] = set()
    # Twice: a library's needs are known only when all have been read.
    for _ in range(2):
        for path in sorted(folder.glob("*.so*")):
            read(path, wanted, loose, defined)
    missing = {name: found for name, found in wanted.items() if not (folder / name).exists()}
    # The rest of what has no version and is not torch's is C++'s own, Python's or the system's.
    loose = {name for name in loose - defined if name.startswith(("cu", "nccl", "nv"))}
    for name, found in missing.items():
        if not found:
            found[UNVERSIONED] = loose
        build(folder, name, found)
    count = sum(len(names) for found in missing.values() for names in found.values())
    print(f"{len(missing)} stubs, {count} functions", file=sys.stderr)


if __name__ == "__main__":
    main()
