use std::path::Path;
use std::process::Command;

/// Builds `csrc/properties.c` with the address and undefined-behavior sanitizers and walks a
/// million steps. Skips with a message if the C compiler lacks them.
#[test]
fn policy_holds_its_promises_under_sanitizers() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR"));
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("slip_properties");
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let flags = "-std=gnu11 -O1 -g -Wall -Wextra -Werror -fno-sanitize-recover=all \
                 -fsanitize=address,undefined";
    let sanitize = |file: &Path, out: &Path| {
        Command::new(&compiler)
            .args(flags.split_whitespace())
            .arg("-I")
            .arg(source.join("include"))
            .arg("-o")
            .arg(out)
            .arg(file)
            .output()
    };
    let probe = program.with_extension("c");
    std::fs::write(&probe, "int main(void) { return 0; }\n").unwrap();
    if !sanitize(&probe, &program).is_ok_and(|o| o.status.success()) {
        eprintln!("SKIPPED: `{compiler}` does not build with -fsanitize=address,undefined");
        return;
    }
    let built = sanitize(&source.join("csrc/properties.c"), &program).unwrap();
    assert!(
        built.status.success(),
        "{}",
        String::from_utf8_lossy(&built.stderr)
    );
    for seed in ["1", "2", "3"] {
        let walk = Command::new(&program)
            .args([seed, "300000"])
            .output()
            .unwrap();
        assert!(
            walk.status.success(),
            "seed {seed}: {}",
            String::from_utf8_lossy(&walk.stderr)
        );
    }
}
