//! Compiles the BPF program with clang.

use std::path::PathBuf;
use std::process::Command;

/// The policy and the BPF program that runs it.
const POLICY: &str = "../../cpusched";

fn main() {
    for folder in ["bpf", "include"] {
        println!("cargo:rerun-if-changed={POLICY}/{folder}");
    }
    println!("cargo:rerun-if-env-changed=BPF_CLANG");
    let clang = find_clang();
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let libbpf = std::env::var("DEP_BPF_INCLUDE").expect("libbpf-sys sets the path of its headers");
    for source in ["slipstream", "decide"] {
        let status = Command::new(&clang)
            .args([
                "-g", "-O2", "-Wall", "-Wextra", "-Werror", "-target", "bpf", "-mcpu=v3",
            ])
            // Kernel types are partial by design; BPF_PROG leaves its context unused.
            .args(["-Wno-unused-parameter", "-Wno-missing-declarations"])
            .arg(format!("-I{POLICY}/include"))
            .arg(format!("-I{libbpf}"))
            .arg("-c")
            .arg(format!("{POLICY}/bpf/{source}.bpf.c"))
            .arg("-o")
            .arg(out.join(format!("{source}.bpf.o")))
            .status()
            .unwrap_or_else(|e| panic!("starting {clang}: {e}"));
        assert!(
            status.success(),
            "{clang} failed on {POLICY}/bpf/{source}.bpf.c: {status}"
        );
    }
}

/// `BPF_CLANG`, or the newest installed clang.
fn find_clang() -> String {
    if let Ok(clang) = std::env::var("BPF_CLANG") {
        return clang;
    }
    let names = (16..=22)
        .rev()
        .map(|v| format!("clang-{v}"))
        .chain(["clang".to_owned()]);
    for name in names {
        let found = Command::new(&name).arg("--version").output();
        if found.is_ok_and(|o| o.status.success()) {
            return name;
        }
    }
    panic!(
        "no clang found to compile the BPF program; install one (Debian 12: apt-get install \
         clang-19 libelf-dev zlib1g-dev pkg-config) or name it in BPF_CLANG"
    );
}
