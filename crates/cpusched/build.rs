//! Compiles the policy header for the simulator.
fn main() {
    println!("cargo:rerun-if-changed=include");
    println!("cargo:rerun-if-changed=csrc");
    cc::Build::new()
        .file("csrc/native.c")
        .include("include")
        .flag_if_supported("-std=gnu11")
        .warnings(true)
        .extra_warnings(true)
        .warnings_into_errors(true)
        .compile("slip_policy");
}
