#!/usr/bin/env python3
"""Print the crates that the binary is linked from as CycloneDX 1.5 JSON.

Reads `cargo metadata` of the workspace, for the normal dependencies of slipstream-cli. The same sources give
the same bytes: no time and no random serial number.
"""

import json
import subprocess
import sys


def metadata():
    out = subprocess.run(
        [
            "cargo",
            "metadata",
            "--locked",
            "--format-version=1",
            "--filter-platform=x86_64-unknown-linux-gnu",
        ],
        check=True,
        capture_output=True,
    ).stdout
    return json.loads(out)


def linked(meta, root):
    """Ids of `root` and of its normal dependencies, at any depth."""
    nodes = {node["id"]: node for node in meta["resolve"]["nodes"]}
    found, queue = set(), [root]
    while queue:
        at = queue.pop()
        if at in found:
            continue
        found.add(at)
        for dep in nodes[at]["deps"]:
            if any(kind["kind"] is None for kind in dep["dep_kinds"]):
                queue.append(dep["pkg"])
    return found, nodes


def main():
    meta = metadata()
    packages = {package["id"]: package for package in meta["packages"]}
    root = next(p["id"] for p in meta["packages"] if p["name"] == "slipstream-cli")
    found, nodes = linked(meta, root)

    def ref(package):
        return f"pkg:cargo/{package['name']}@{package['version']}"

    def component(package, kind):
        out = {
            "type": kind,
            "bom-ref": ref(package),
            "name": package["name"],
            "version": package["version"],
            "purl": ref(package),
        }
        if package.get("license"):
            out["licenses"] = [{"expression": package["license"].replace("/", " OR ")}]
        return out

    chosen = sorted((packages[at] for at in found if at != root), key=ref)
    bom = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": component(packages[root], "application")},
        "components": [component(package, "library") for package in chosen],
        "dependencies": [
            {
                "ref": ref(packages[at]),
                "dependsOn": sorted(
                    ref(packages[dep["pkg"]])
                    for dep in nodes[at]["deps"]
                    if dep["pkg"] in found
                    and any(kind["kind"] is None for kind in dep["dep_kinds"])
                ),
            }
            for at in sorted(found, key=lambda at: ref(packages[at]))
        ],
    }
    json.dump(bom, sys.stdout, indent=1, sort_keys=True)
    print()


if __name__ == "__main__":
    main()
