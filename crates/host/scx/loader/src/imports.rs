//! The kernel functions that the compiled BPF program imports, from its type information.

use anyhow::Context as _;
use object::{Object as _, ObjectSection as _, ObjectSymbol as _};
use slipstream_scx::btf;
use slipstream_scx::doctor::{Import, plain_name};

/// The functions that the kernel must have to load the program.
///
/// # Errors
/// If the bytes are not an object with type information.
pub fn of_object(bytes: &[u8]) -> anyhow::Result<Vec<Import>> {
    let file = object::File::parse(bytes).context("the BPF object is damaged; rebuild it")?;
    let section = file
        .section_by_name(".BTF")
        .context("the BPF object has no type information; rebuild it")?;
    let externs = btf::externs(section.data()?)?;
    let is_weak = |name: &str| {
        let symbol = file.symbols().find(|s| s.name() == Ok(name));
        symbol.is_some_and(|s| s.is_weak())
    };
    Ok(externs
        .into_iter()
        .map(|(name, params)| Import {
            is_weak: is_weak(&name),
            name: plain_name(&name).to_owned(),
            params,
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use slipstream_scx::doctor::declared_imports;

    /// `slipstream sched doctor`, which has no object, reads the header instead.
    #[test]
    fn header_declares_what_the_object_imports() {
        let imports = of_object(crate::PROGRAM).unwrap();
        assert!(imports.iter().any(|i| i.name == "scx_bpf_kick_cpu"));
        // libbpf's own header declares loops over numbers, which any kernel with sched_ext supports.
        let ours = |i: &&Import| !i.name.starts_with("bpf_iter_num_");
        for import in imports.iter().filter(ours) {
            let declared = declared_imports().iter().find(|d| d.name == import.name);
            assert_eq!(declared, Some(import));
        }
        let mut unused: Vec<&str> = declared_imports().iter().map(|d| d.name.as_str()).collect();
        unused.retain(|name| !imports.iter().any(|i| i.name == *name));
        assert!(unused.is_empty(), "declared and never called: {unused:?}");
    }

    #[test]
    fn damaged_objects_are_refused() {
        assert!(of_object(b"no object").is_err());
        assert!(of_object(&crate::PROGRAM[..100]).is_err());
    }
}
