//! Compiles the policy header, and the BPF program that uses it, for the simulator.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

const PROGRAM: &str = "bpf";

fn main() {
    for watched in ["include", "csrc", PROGRAM] {
        println!("cargo:rerun-if-changed={watched}");
    }
    cc::Build::new()
        .file("csrc/native.c")
        .include("include")
        .flag_if_supported("-std=gnu11")
        .warnings(true)
        .extra_warnings(true)
        .warnings_into_errors(true)
        .compile("slip_policy");

    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let read = |name: &str| {
        let path = Path::new(PROGRAM).join(name);
        std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
    };
    let source = read("slipstream.bpf.c");
    let mut inc = String::new();
    for name in globals(&source) {
        let _ = writeln!(inc, "{{ (void *)&{name}, sizeof({name}) }},");
    }
    std::fs::write(out.join("globals.inc"), inc).expect("OUT_DIR can be written");
    let mut program = cc::Build::new();
    program
        .file("csrc/program.c")
        .include(&out)
        .include("csrc/host")
        .include("include")
        .include(PROGRAM)
        .flag_if_supported("-std=gnu11")
        // Written for clang's BPF target, which checks it: uses attributes and arrays of the kernel.
        .warnings(false)
        .flag_if_supported("-w")
        .flag_if_supported("-fno-strict-aliasing");
    // Arrays of the kernel's structs are declared with one element and have more.
    program.flag_if_supported("-fno-aggressive-loop-optimizations");
    for op in operations(&source) {
        program.define(&format!("SLIP_OP_{op}"), None);
    }
    if read("intf.h").contains("u64 online[") {
        program.define("SLIP_CONFIG_ONLINE", None);
    }
    program.compile("slip_program");
}

/// The operations that the program defines: `.select_cpu = (void *)...`.
fn operations(source: &str) -> Vec<&str> {
    source.lines().filter_map(operation).collect()
}

fn operation(line: &str) -> Option<&str> {
    let (name, value) = line.trim().strip_prefix('.')?.split_once(" = ")?;
    value.starts_with("(void *)").then_some(name)
}

/// The program's global variables: definitions at the start of a line that end in `;` and are not
/// functions, types, maps or constants.
fn globals(source: &str) -> Vec<&str> {
    source.lines().filter_map(global).collect()
}

fn global(line: &str) -> Option<&str> {
    let starts = [
        "const volatile ",
        "volatile ",
        "static ",
        "struct ",
        "u32 ",
        "u64 ",
        "s32 ",
        "s64 ",
        "bool ",
    ];
    if !starts.iter().any(|s| line.starts_with(s))
        || !line.ends_with(';')
        || line.contains('(') && !line.contains("SEC(")
    {
        return None;
    }
    let declared = line
        .split(" SEC(")
        .next()?
        .split(" = ")
        .next()?
        .trim_end_matches(';');
    let declared = declared.split('[').next()?;
    let (kind, name) = declared.rsplit_once([' ', '*'])?;
    (kind.trim() != "struct").then_some(name)
}
