//! A table of deployments, with TTFT and TPOT predicted for each.

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use anyhow::Context;
use serde::{Deserialize, Serialize};
use slipstream_config::preset::{ModelFiles, ModelShape};
use slipstream_perf::{
    Deployment, Distance, Estimate, Profile, Row, predict, read_rows, unknown_columns,
};

use crate::columns::Column;
use crate::files;

/// The question: how fast are these deployments?
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Question {
    /// Name of the table, for errors.
    pub name: String,
    /// The table, as CSV with a header (`docs/accuracy.md` lists the columns).
    pub table: String,
    /// A profile of `slipstream calibrate`; `None`: the built-in one.
    pub profile: Option<PathBuf>,
    /// Folder of models that are no presets: `<model_path>/config.json`.
    pub models: Option<PathBuf>,
}

/// The answer of one row.
#[derive(Clone, Debug)]
pub struct Answered {
    /// Its id.
    pub id: String,
    /// The estimate and the assumptions, or why there is none.
    pub answer: Result<(Estimate, Vec<String>), String>,
}

/// The answers of a table.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Shape `[rows of the table]`.
    pub rows: Vec<Answered>,
    /// Notes about the table.
    pub notes: Vec<String>,
    /// A line for each model and format of its rows.
    pub models: Vec<String>,
}

impl Question {
    /// Answers every row, or says why not.
    ///
    /// # Errors
    /// If a file cannot be read, or the table is none.
    pub fn answer(&self) -> anyhow::Result<Answer> {
        let profile = load_profile(self.profile.as_deref())?;
        let rows =
            read_rows(self.table.as_bytes()).with_context(|| format!("reading {}", self.name))?;
        anyhow::ensure!(
            !rows.is_empty(),
            "{} has no rows; it must be a CSV table with a header (docs/accuracy.md)",
            self.name
        );
        if let Some(folder) = &self.models {
            anyhow::ensure!(
                folder.is_dir(),
                "--models {} is no directory; it must hold <model_path>/config.json",
                folder.display()
            );
        }
        let warnings = Mutex::new(Vec::new());
        let models = |name: &str| {
            model_of(self.models.as_deref(), name).unwrap_or_else(|warning| {
                let mut warnings = warnings.lock().expect("warnings are whole");
                if !warnings.contains(&warning) {
                    warnings.push(warning);
                }
                None
            })
        };
        let (answered, lines) = answer(&rows, &profile, &models);
        let mut notes: Vec<String> = unknown_note(&rows).into_iter().collect();
        notes.extend(warnings.into_inner().expect("warnings are whole"));
        let refused = answered.iter().filter(|row| row.answer.is_err()).count();
        if refused > 0 {
            notes.push(format!(
                "{refused} of {} rows were not answered; the column `reason` says why",
                rows.len()
            ));
        }
        Ok(Answer {
            rows: answered,
            notes,
            models: lines,
        })
    }
}

/// A note about columns that nothing is read from, such as misspelt ones.
pub fn unknown_note(rows: &[Row]) -> Option<String> {
    let unknown = unknown_columns(rows);
    (!unknown.is_empty()).then(|| {
        format!(
            "columns that are not read: {}; docs/accuracy.md lists those that are",
            unknown.join(", ")
        )
    })
}

fn answer(
    rows: &[Row],
    profile: &Profile,
    models: &dyn Fn(&str) -> Option<ModelShape>,
) -> (Vec<Answered>, Vec<String>) {
    let mut lines: Vec<String> = Vec::new();
    let mut of = |row: &Row| {
        let deployment = Deployment::read(row, models).map_err(|refusal| refusal.to_string())?;
        let line = deployment
            .formats
            .line(&deployment.shape.name, &deployment.shape);
        if !lines.contains(&line) {
            lines.push(line);
        }
        let estimate = predict(&deployment, profile).map_err(|refusal| refusal.to_string())?;
        Ok((estimate, deployment.assumed))
    };
    let rows = rows
        .iter()
        .map(|row| Answered {
            id: row.id.clone(),
            answer: of(row),
        })
        .collect();
    (rows, lines)
}

/// How far a deployment is from measured ones, in words.
fn extrapolated(estimate: &Estimate) -> String {
    let far = estimate.distances.iter().map(|distance| match distance {
        Distance::Near => "no",
        other => other.name(),
    });
    far.collect::<Vec<_>>().join("; ")
}

/// Times of an estimate, ms, in the order of the table's columns.
fn times(e: &Estimate) -> [f64; 6] {
    [
        e.ttft_ms,
        e.ttft_low_ms,
        e.ttft_high_ms,
        e.tpot_ms,
        e.tpot_low_ms,
        e.tpot_high_ms,
    ]
}

/// Names of the times, in order.
const TIMES: [&str; 6] = [
    "ttft_ms",
    "ttft_low_ms",
    "ttft_high_ms",
    "tpot_ms",
    "tpot_low_ms",
    "tpot_high_ms",
];

impl Answer {
    /// The table of answers as CSV.
    pub fn csv(&self) -> String {
        let mut text = format!(
            "id,{},extrapolated,saturated,assumed,reason\n",
            TIMES.join(",")
        );
        for row in &self.rows {
            let id = quoted(&row.id);
            let line = match &row.answer {
                Ok((estimate, assumed)) => {
                    let times = times(estimate).map(|ms| format!("{ms:.4}"));
                    format!(
                        "{id},{},{},{},{},\n",
                        times.join(","),
                        extrapolated(estimate),
                        if estimate.saturated { "yes" } else { "no" },
                        quoted(&assumed.join("; ")),
                    )
                }
                Err(reason) => format!("{id},,,,,,,,,,{}\n", quoted(reason)),
            };
            text.push_str(&line);
        }
        text
    }

    /// The table of answers as columns.
    pub fn columns(&self) -> Vec<Column> {
        let mut columns = vec![Column::text("id")];
        columns.extend(TIMES.map(Column::f64));
        columns.extend(["extrapolated", "saturated", "assumed", "reason"].map(Column::text));
        for row in &self.rows {
            let (estimate, assumed, reason) = match &row.answer {
                Ok((estimate, assumed)) => (Some(estimate), Some(assumed.join("; ")), None),
                Err(reason) => (None, None, Some(reason.as_str())),
            };
            columns[0].push_text(Some(&row.id));
            let times = estimate.map(times);
            for (at, column) in columns[1..=TIMES.len()].iter_mut().enumerate() {
                column.push_f64(times.map(|times| times[at]));
            }
            let far = estimate.map(extrapolated);
            let saturated = estimate.map(|e| if e.saturated { "yes" } else { "no" });
            let texts = [far.as_deref(), saturated, assumed.as_deref(), reason];
            for (column, text) in columns[TIMES.len() + 1..].iter_mut().zip(texts) {
                column.push_text(text);
            }
        }
        columns
    }
}

/// The profile in `path`, or the built-in one.
///
/// # Errors
/// If it cannot be read.
pub fn load_profile(path: Option<&Path>) -> anyhow::Result<Profile> {
    let Some(path) = path else {
        return Ok(Profile::built_in().clone());
    };
    let text = files::read(path).with_context(|| format!("reading {}", path.display()))?;
    let text = String::from_utf8(text).with_context(|| format!("reading {}", path.display()))?;
    Profile::parse(&text).with_context(|| format!("{}", path.display()))
}

/// The shape in `folder`/`name`/config.json, if there is one that can be read.
fn model_of(folder: Option<&Path>, name: &str) -> Result<Option<ModelShape>, String> {
    // A name comes from a table: it may not leave the folder.
    if name
        .split('/')
        .any(|part| part.is_empty() || part.starts_with('.'))
    {
        return Ok(None);
    }
    let Some(path) = folder.map(|folder| folder.join(name).join("config.json")) else {
        return Ok(None);
    };
    if !path.exists() {
        return Ok(None);
    }
    let failed = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let files = ModelFiles::load(&path, &mut files::read).map_err(|error| failed(&error))?;
    let read = files.read(name).map_err(|error| failed(&error))?;
    Ok(Some(read.shape))
}

/// `text` as a cell of a CSV table.
fn quoted(text: &str) -> String {
    if text.contains([',', '"', '\n', '\r']) {
        format!("\"{}\"", text.replace('"', "\"\""))
    } else {
        text.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_has_an_answer_or_a_reason_in_its_place() {
        let text = b"id,model_path,system,backend,precision,isl,osl,batch_size,tp_size\n\
            \"a,b\",meta-llama/Llama-3.1-70B,h200_sxm,vllm,fp8,1024,1024,16,8\n\
            c,acme/unheard-of,h200_sxm,vllm,fp8,1024,1024,16,8\n\
            d,meta-llama/Llama-3.1-70B,b300,vllm,fp8,1024,1024,16,\n\
            e,google/gemma-3-27b-it,b300,vllm,fp8,1024,1024,16,1\n";
        let rows = read_rows(text).unwrap();
        let (rows, models) = answer(&rows, Profile::built_in(), &|_| None);
        assert_eq!(models.len(), 2, "{models:?}");
        let refused = rows.iter().filter(|row| row.answer.is_err());
        assert_eq!(refused.count(), 1);
        let notes = Vec::new();
        let answers = Answer {
            rows,
            notes,
            models,
        }
        .csv();
        let again = read_rows(answers.as_bytes()).unwrap();
        let ids: Vec<&str> = again.iter().map(|row| row.id.as_str()).collect();
        assert_eq!(ids, ["a,b", "c", "d", "e"]);
        assert_eq!(again[0].get("extrapolated"), Some("no"));
        assert!(again[0].number("ttft_ms").unwrap() > again[0].number("tpot_ms").unwrap());
        assert_eq!(again[1].get("ttft_ms"), None);
        assert_eq!(
            again[1].get("reason"),
            Some("unknown model: acme/unheard-of")
        );
        assert_eq!(again[2].get("extrapolated"), Some("gpu"));
        assert_eq!(again[3].get("extrapolated"), Some("model; gpu"));
        assert_eq!(
            again[2].get("assumed"),
            Some("tp_size: 1; kv_cache_dtype: fp8")
        );
    }

    #[test]
    fn a_name_in_a_table_cannot_leave_the_folder_of_models() {
        let folder = tempfile::tempdir().unwrap();
        let inside = folder.path().join("models/org/tiny");
        std::fs::create_dir_all(&inside).unwrap();
        let json = r#"{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
            "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 128}"#;
        std::fs::write(inside.join("config.json"), json).unwrap();
        std::fs::write(folder.path().join("config.json"), json).unwrap();
        let models = folder.path().join("models");
        let found = |name: &str| model_of(Some(&models), name).unwrap().is_some();
        assert!(found("org/tiny"));
        assert!(!found("..") && !found("org/../..") && !found("/") && !found("org/absent"));
    }
}
