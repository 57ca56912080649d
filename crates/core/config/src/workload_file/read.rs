//! Reads the workload file from TOML.

use super::arrival::{Arrival, read_arrival};
use super::class::{read_classes, refuse_class_keys};
use super::trace::read_trace;
use super::{Content, Workload, WorkloadKeys};
use crate::doc::{Diagnostics, Doc, Settings};

/// Factors of time: within them, no usual time is beyond the clock's range or below its resolution.
pub const TIME_SCALES: std::ops::RangeInclusive<f64> = 1e-9..=1e9;

/// Keys by which a workload file is known.
pub(crate) const TELLING_KEYS: [&str; 5] = ["isl", "osl", "arrival", "session", "requests"];

/// Reads a workload, and records the origin of every value.
///
/// # Errors
/// All errors of the document together.
pub fn read(doc: Doc) -> Result<(Workload, Settings), Diagnostics> {
    doc.refuse_kind(
        &TELLING_KEYS,
        &crate::cluster::file::TELLING_KEYS,
        "this is a cluster file, not a workload file",
        "give it without `--workload`",
    )?;
    doc.read(|root| {
        // Plain keys before tables, so that the settings print as valid TOML.
        let mut workload = Workload {
            seed: WorkloadKeys::seed().read(root),
            requests: WorkloadKeys::requests().read(root),
            duration_s: WorkloadKeys::duration_s().read(root),
            time_scale: WorkloadKeys::time_scale().read(root),
            ..Workload::default()
        };
        let has_trace = root.has("trace");
        if has_trace {
            refuse_class_keys(root, "the trace has the prompts");
            root.refuse(
                "class",
                "is not used: the trace has the prompts",
                "remove it, or `[trace]`",
            );
            workload.content = Content::Trace(root.table("trace", read_trace));
        } else {
            workload.content = Content::Generated(read_classes(root));
        }
        workload.arrival = read_arrival(root, has_trace);
        // A key with an invalid value is an error of its own.
        let ends = root.has("requests")
            || root.has("duration_s")
            || matches!(workload.content, Content::Trace(_))
            || matches!(workload.arrival, Arrival::Timestamps { .. });
        if !ends {
            root.error(
                "requests",
                "the workload never ends: neither `requests` nor `duration_s` is set",
                "set `requests = 1000`, or `duration_s = 60`",
            );
        }
        workload
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload_file::{Bounds, Dist, OnBadLine, TimeUnit};

    fn check(text: &str) -> Result<Workload, String> {
        read(Doc::parse("w.toml", text.as_bytes()))
            .map(|(workload, _)| workload)
            .map_err(|e| e.to_string())
    }

    const WHOLE: &str = r#"
            seed = 7
            requests = 500
            time_scale = 60
            osl = { kind = "choice", values = [1, 100], weights = [1, 3] }
            isl = { kind = "lognormal", mean = 2000, cv = 0.5, max = 8000 }
            [arrival]
            kind = "gamma"
            rate_per_s = 4
            cv = 2.5
            [[prefix]]
            branches = 8
            tokens = 512
            skew = 1.1
            [[prefix]]
            branches = 2
            tokens = { kind = "uniform", min = 10, max = 20 }
            [session]
            turns = 5
            think_time_s = { kind = "exponential", mean = 10 }
            isl_max = 16000
            "#;

    #[test]
    fn a_whole_file() {
        let workload = check(WHOLE).unwrap();
        assert_eq!(
            (workload.seed, workload.requests, workload.time_scale),
            (7, Some(500), 60.0)
        );
        assert_eq!(
            workload.arrival,
            Arrival::Gamma {
                rate_per_s: 4.0,
                cv: 2.5
            }
        );
        let Content::Generated(classes) = &workload.content else {
            panic!("no trace")
        };
        let class = &classes[0];
        let bounds = Bounds {
            min: 1.0,
            max: 8000.0,
        };
        assert_eq!(
            class.isl,
            Dist::LogNormal {
                mean: 2000.0,
                cv: 0.5,
                bounds
            }
        );
        assert_eq!(class.prefix.len(), 2);
        assert_eq!(
            class.prefix[1].tokens,
            Dist::Uniform {
                min: 10.0,
                max: 20.0
            }
        );
        assert_eq!(class.session.isl_max, Some(16_000));
        assert_eq!(class.session.turns, Dist::Exact(5.0));
    }

    /// The output of `--print-config` is a workload file with the same meaning.
    #[test]
    fn settings_read_back_to_the_same_workload() {
        for text in [
            WHOLE,
            "requests = 5\n[session]\nthink_time_s = { kind = \"uniform\", min = 1, max = 2 }",
            "duration_s = 5\n[[class]]\nweight = 3\nosl = 7\n[[class.prefix]]\nbranches = 2\n[[class]]\n",
            "seed = 3\n[trace]\nfile = \"/t.jsonl\"\n",
            "requests = 5\nslo = \"ttft=1s\"\n[arrival]\nkind = \"ramp\"\nto_per_s = 9\nramp_s = 60\n",
            "requests = 5\n[arrival]\nkind = \"diurnal\"\nrate_per_s = 9\namplitude = 0.9\n",
            "requests = 5\nisl = { kind = \"zipf\", min = 2, max = 900 }\n\
             osl = { kind = \"empirical\", file = \"/l.csv\", column = \"out\", max = 50 }\n\
             [arrival]\nkind = \"weibull\"\nrate_per_s = 2\nshape = 0.6\n",
        ] {
            let (workload, settings) = read(Doc::parse("w.toml", text.as_bytes())).unwrap();
            let printed = settings.to_toml();
            assert_eq!(check(&printed).as_ref(), Ok(&workload), "{printed}");
        }
    }

    #[test]
    fn classes_and_traces() {
        let two = check(
            "duration_s = 5\n[[class]]\nweight = 3\n[[class]]\nname = \"b\"\npriority = -2\n",
        );
        let Content::Generated(classes) = two.unwrap().content else {
            panic!("no trace")
        };
        assert_eq!((&*classes[0].name, classes[0].weight), ("class-0", 3.0));
        assert_eq!((&*classes[1].name, classes[1].priority), ("b", -2));
        let trace = check("[trace]\nfile = \"t.jsonl\"\non_bad_line = \"skip\"\n").unwrap();
        assert_eq!(trace.arrival, Arrival::Trace);
        let Content::Trace(file) = trace.content else {
            panic!("a trace")
        };
        assert_eq!(
            (file.on_bad_line, file.tokens_per_id),
            (OnBadLine::Skip, None)
        );
        let own =
            "[trace]\nfile = \"t.csv\"\nunit = \"us\"\ncolumns = \"isl=in,osl=out,arrival=at\"\n";
        let Content::Trace(file) = check(own).unwrap().content else {
            panic!("a trace")
        };
        assert_eq!(file.unit, Some(TimeUnit::Us));
        let columns = file.columns.unwrap();
        assert_eq!(columns.arrival.as_deref(), Some("at"));
        assert_eq!(columns.to_string().parse(), Ok(columns));
        for (columns, says) in [
            ("isl=a", "`osl`, the tokens of the answer, is not named"),
            ("isl=a,isl=b,osl=c", "`isl` is named twice"),
            ("isl=a,osl=", "`osl=` is not KEY=NAME"),
            ("isl=a,osl=b,at=c", "`at` is not a field"),
        ] {
            let text = format!("[trace]\nfile = \"t.csv\"\ncolumns = \"{columns}\"\n");
            let error = check(&text).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn an_empty_file_has_no_end() {
        assert!(check("").unwrap_err().contains("never ends"));
        assert!(check("requests = 3").is_ok());
    }

    #[test]
    fn a_file_of_the_other_kind_is_one_error() {
        assert_eq!(
            check("# a cluster\n[model]\npreset = \"qwen3-8b\"\n[pool.main]\nworkers = 2\n")
                .unwrap_err(),
            "w.toml:2:2: this is a cluster file, not a workload file: it has `model`\n\
             hint: give it without `--workload`"
        );
        let workload = Doc::parse("w.toml", b"requests = 4\n[session]\n");
        let error = crate::cluster::file::read(workload, |_| unreachable!()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "w.toml:1:1: this is a workload file, not a cluster file: it has `requests`\n\
             hint: give it with `--workload`"
        );
        let network = Doc::parse("n.toml", b"seed = 1\n[switch]\nport_rate = 1e9\n");
        let error = crate::cluster::file::read(network, |_| unreachable!()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "n.toml:2:2: this is a file of `slipstream net run`, not a cluster file: it has `switch`\n\
             hint: give it to that, or name it with `network.background`"
        );
        // A key of its own: one mistake among others.
        let mixed = check("requests = 4\n[model]\n").unwrap_err();
        assert!(mixed.contains("unknown key `model`"), "{mixed}");
        // Not the file, but a flag.
        let mut flag = Doc::parse("w.toml", b"");
        flag.set("engine.block_size=16");
        assert!(read(flag).unwrap_err().to_string().contains("unknown key"));
    }

    /// Every error of a file is reported, each with its line and a remedy.
    #[test]
    fn five_mistakes_at_once() {
        let error = check(
            "requests = 0\n\
             isl = \"long\"\n\
             osl = { kind = \"uniform\", min = 20, max = 10 }\n\
             [arrival]\n\
             kind = \"poison\"\n\
             [session]\n\
             turn = 3\n",
        )
        .unwrap_err();
        for says in [
            "w.toml:1:12: `requests`",
            "w.toml:2:7: `isl` is a string",
            "w.toml:3:33: `min` is 20, above `max`",
            "w.toml:5:8: `arrival.kind`",
            "w.toml:7:1: unknown key `session.turn`",
            "did you mean `turns`?",
            "did you mean \"poisson\"?",
        ] {
            assert!(error.contains(says), "{says:?} is not in:\n{error}");
        }
    }

    #[test]
    fn contradictions_are_told() {
        for (text, says) in [
            (
                "requests = 1\n[arrival]\nkind = \"trace\"",
                "there is no `[trace]`",
            ),
            ("requests = 1\n[arrival]\nkind = \"poisson\"", "rate_per_s"),
            (
                "duration_s = 1\n[arrival]\nkind = \"constant\"\nrate_per_s = 1e300",
                "`arrival.rate_per_s` is 1e300, but must be at least 1e-8 (one in three years) and at most 1e9",
            ),
            (
                "requests = 1\n[arrival]\nkind = \"closed\"\nrate_per_s = 2",
                "is not used",
            ),
            (
                "requests = 1\nisl = 100\n[[prefix]]\nbranches = 2\ntokens = 100",
                "shorten the prefix",
            ),
            (
                "requests = 1\nisl = 5\n[[class]]\n",
                "there are `[[class]]` tables",
            ),
            ("requests = 1\nisl = 0", "`isl` is 0"),
            ("requests = 1\n[[class]]\nweight = 0", "weight 0"),
            ("[arrival]\nkind = \"timestamps\"\nms = [5, 1]", "in order"),
            (
                "isl = 4\n[arrival]\nkind = \"timestamps\"\nms = [0, nan, 5]",
                "w.toml:4:10: `arrival.ms[1]` is NaN, but must be a finite number",
            ),
            (
                "[arrival]\nkind = \"timestamps\"\nms = [0, 1, \"2\"]",
                "`arrival.ms[2]` is a string (\"2\"), but must be a finite number",
            ),
            (
                "requests = 1\nisl = { kind = \"choice\", values = [1, inf] }",
                "`isl.values[1]` is inf, but must be a finite number",
            ),
            (
                "isl = 4\n[trace]\nfile = \"x\"",
                "the trace has the prompts",
            ),
            ("[trace]\n", "set the JSONL file"),
            ("requests = 1\nisl = { mean = 5 }", "set the distribution"),
            (
                "requests = 1\nosl = { kind = \"choice\", values = [1, 2], weights = [1] }",
                "2 numbers",
            ),
            (
                "requests = 1\nisl = { kind = \"zipf\", min = 1.5, max = 9 }",
                "a whole number",
            ),
            (
                "requests = 1\nisl = { kind = \"empirical\" }",
                "set the CSV file",
            ),
            (
                "requests = 1\n[arrival]\nkind = \"weibull\"\nrate_per_s = 1\nshape = 0",
                "shape",
            ),
            (
                "requests = 1\n[arrival]\nkind = \"ramp\"",
                "`to_per_s = 20`",
            ),
            (
                "requests = 1\n[arrival]\nkind = \"ramp\"\nto_per_s = 1\nramp_s = 1\ncv = 2",
                "only Gamma arrivals",
            ),
            (
                "requests = 1\n[arrival]\nkind = \"diurnal\"\nrate_per_s = 1\namplitude = 2",
                "amplitude",
            ),
            ("requests = 1\nslo = \"tfft=1s\"", "expected ttft"),
        ] {
            let error = check(text).unwrap_err();
            assert!(error.contains(says), "{says:?} is not in:\n{error}");
        }
    }
}
