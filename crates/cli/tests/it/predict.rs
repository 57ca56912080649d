//! `slipstream predict` and `slipstream calibrate`: exit status and messages.

use std::path::Path;
use std::process::Output;

use crate::server::slipstream;

const HEAD: &str = "model_path,system,backend,precision,isl,osl,batch_size,tp_size";

fn table(folder: &Path, text: &str) -> std::path::PathBuf {
    let path = folder.join("table.csv");
    std::fs::write(&path, text).unwrap();
    path
}

fn predict(text: &str, more: &[&str]) -> (Output, String, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = table(folder.path(), text);
    let output = slipstream()
        .arg("predict")
        .arg(path)
        .args(more)
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    (output, out, err)
}

#[test]
fn rows_with_unusable_sizes_are_refused_and_the_others_answered() {
    let row = |batch: &str, tp: &str| format!("qwen3-32b,h200,vllm,fp8,1024,1024,{batch},{tp}\n");
    let rows = [
        row("8", "0.5"),
        row("8", "2"),
        row("inf", "2"),
        row("NaN", "2"),
    ]
    .concat();
    let (output, out, err) = predict(&format!("{HEAD}\n{rows}"), &[]);
    assert_eq!(output.status.code(), Some(0), "{err}");
    let lines: Vec<&str> = out.lines().skip(1).collect();
    assert!(lines[0].contains("tp_size is \"\"0.5\"\""), "{out}");
    assert!(
        lines[1].starts_with("2,") && lines[1].contains(",combination,no,"),
        "{out}"
    );
    assert!(lines[2].contains("batch_size is \"\"inf\"\""), "{out}");
    assert!(lines[3].contains("missing: batch_size"), "{out}");
    assert!(err.contains("3 of 4 rows were not answered"), "{err}");
}

#[test]
fn ambiguous_tables_and_absent_folders_fail() {
    let row = "qwen3-32b,h200,vllm,fp8,1024,1024,8,2";
    let good = format!("{HEAD}\n{row}\n");
    for (text, more, part) in [
        (
            format!("{HEAD},isl\n{row},9\n"),
            &[][..],
            "\"isl\" more than once",
        ),
        (good.replace(',', ";"), &[], "semicolons"),
        (
            good.clone(),
            &["--models", "/nonexistent/models"],
            "--models /nonexistent/models is no directory",
        ),
    ] {
        let (output, out, err) = predict(&text, more);
        assert_eq!(output.status.code(), Some(2), "{err}");
        assert!(out.is_empty() && err.contains(part), "{err}");
    }
    let (output, _, err) = predict(&format!("{HEAD},tp_sise\n{row},4\n"), &[]);
    assert_eq!(output.status.code(), Some(0));
    assert!(err.contains("columns that are not read: tp_sise;"), "{err}");
}

#[test]
fn calibrate_counts_rows_that_it_cannot_fit_to() {
    let folder = tempfile::tempdir().unwrap();
    let rows: Vec<String> = (1..=24)
        .map(|i| format!("qwen3-32b,h200,vllm,fp8,1024,1024,{i},2,100,8.{i:02}"))
        .collect();
    let good = rows.join("\n") + "\n";
    let bad = "qwen3-32b,h200,vllm,fp8,1024,1024,8,0.5,100,8\n\
        qwen3-32b,h200,vllm,fp8,1024,1024,8,2,inf,8\n\
        qwen3-32b,h200,vllm,fp8,1024,1024,8,2,100,1e-320\n";
    let path = table(
        folder.path(),
        &format!("{HEAD},ttft_ms,tpot_ms\n{good}{bad}"),
    );
    let output = slipstream()
        .args(["calibrate", "--from-points"])
        .arg(path)
        .output()
        .unwrap();
    let err = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "{err}");
    assert!(
        err.contains("1 rows left out: invalid: tp_size is \"0.5\""),
        "{err}"
    );
    assert!(
        err.contains("2 rows left out: ttft_ms or tpot_ms is not a positive number"),
        "{err}"
    );
    let out = String::from_utf8(output.stdout).unwrap();
    assert!(out.contains("Measured deployments: 24."), "{out}");
}
