//! Outputs never replace inputs. In a process of its own, as inputs are noted per process.

use std::os::unix::fs::symlink;
use std::path::Path;

use slipstream_report::partial::{Partial, save_text};

fn content(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap()
}

#[test]
fn inputs_are_not_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    slipstream_os::files::note_inputs();
    std::fs::write(at("in"), "input").unwrap();
    std::fs::hard_link(at("in"), at("other")).unwrap();
    symlink("in", at("link")).unwrap();
    let (_, mut begun) = Partial::create(&at("in")).unwrap();
    slipstream_os::files::read(&at("link")).unwrap();
    for name in ["in", "other", "link"] {
        let error = save_text(&at(name), "output").unwrap_err().to_string();
        assert!(error.contains("an input of this run"), "{name}: {error}");
    }
    begun.complete().unwrap_err();
    // Remains of an earlier run as an input: the output would be written there first.
    std::fs::write(at("run.partial"), "remains").unwrap();
    slipstream_os::files::read(&at("run.partial")).unwrap();
    save_text(&at("run"), "output").unwrap_err();
    assert_eq!(content(&at("run.partial")), "remains");
    assert_eq!(content(&at("in")), "input");
    save_text(&at("out"), "output").unwrap();
    assert_eq!(content(&at("out")), "output");
}
