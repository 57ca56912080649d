//! Reads the workload file from TOML.

use std::path::PathBuf;

use super::arrival::read_arrival;
use super::dist::read_dists;
use super::{
    Arrival, Class, Content, IMAGE_TOKENS_MAX, IMAGES_MAX, OnBadLine, PrefixLevel, SessionShape,
    TimeUnit, TraceFile, Workload,
};
use crate::doc::{Diagnostics, Doc, Settings, Table};

/// Limit of a prefix level's branches: each has an entry in a table of popularities.
const BRANCHES_MAX: u32 = 1_000_000;
/// Longest prompt or answer, tokens: far beyond any model, and sums stay within 32 bits.
const TOKENS_MAX: f64 = 100_000_000.0;
/// Limit of a session's turns: a request's number has 12 bits for them.
const TURNS_MAX: f64 = 4_096.0;
/// Longest think time, s: a year.
const THINK_TIME_S_MAX: f64 = 31_536_000.0;

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
            seed: root.get("seed").or(0),
            requests: root.get("requests").within(1..).optional(),
            duration_s: root
                .get("duration_s")
                .check(|s| *s > 0.0, "above 0")
                .optional(),
            time_scale: root
                .get("time_scale")
                .check(|s| *s > 0.0, "above 0")
                .or(1.0),
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

fn read_trace(t: &Table<'_>) -> TraceFile {
    TraceFile {
        path: t.path("file").required(
            "set the JSONL file: `file = \"trace.jsonl\"`",
            PathBuf::new(),
        ),
        on_bad_line: t
            .choice(
                "on_bad_line",
                &[("stop", OnBadLine::Stop), ("skip", OnBadLine::Skip)],
            )
            .or(OnBadLine::Stop),
        tokens_per_id: t.get("tokens_per_id").within(1..=1_000_000).optional(),
        unit: t.choice("unit", &TimeUnit::NAMES).optional(),
        columns: t.get::<String>("columns").optional().and_then(|text| {
            let wrong = |error: String| {
                t.error(
                    "columns",
                    format!("`columns`: {error}"),
                    "write for example `columns = \"arrival=Timestamp,isl=Prompt,osl=Answer\"`",
                );
            };
            text.parse().map_err(wrong).ok()
        }),
    }
}

const CLASS_KEYS: [&str; 13] = [
    "isl",
    "osl",
    "ignore_eos",
    "priority",
    "models",
    "model_weights",
    "adapters",
    "adapter_skew",
    "images_per_request",
    "image_tokens",
    "slo",
    "prefix",
    "session",
];

fn refuse_class_keys(root: &Table<'_>, why: &str) {
    for key in CLASS_KEYS {
        root.refuse(key, &format!("is not used: {why}"), "remove it");
    }
}

fn read_classes(root: &Table<'_>) -> Vec<Class> {
    if !root.has("class") {
        return vec![read_class(root, Class::default().name, 1.0)];
    }
    refuse_class_keys(root, "there are `[[class]]` tables, each with its own");
    let classes = root.array("class", |index, t| {
        let name = t.get("name").or(format!("class-{index}"));
        let weight = t.get("weight").check(|w| *w >= 0.0, "0 or more").or(1.0);
        read_class(t, name, weight)
    });
    if !classes.is_empty() && classes.iter().all(|c| c.weight == 0.0) {
        root.error(
            "class",
            "every `[[class]]` has weight 0",
            "give one of them a weight above 0",
        );
    }
    if classes.is_empty() {
        vec![Class::default()]
    } else {
        classes
    }
}

fn read_class(t: &Table<'_>, name: String, weight: f64) -> Class {
    let ignore_eos = t.get("ignore_eos").or(Class::default().ignore_eos);
    let priority = t
        .get::<i64>("priority")
        .within(i64::from(i32::MIN)..=i64::from(i32::MAX))
        .or(0);
    let priority = i32::try_from(priority).expect("it is within the range above");
    let (models, model_weights) = read_models(t);
    let adapters: Vec<String> = t
        .get("adapters")
        .check(
            |names: &Vec<String>| {
                let fits = |name: &String| !name.is_empty() && name.len() <= 256;
                names.len() <= 1024 && names.iter().all(fits)
            },
            "up to 1,024 names of 1 to 256 bytes",
        )
        .or(Vec::new());
    let adapter_skew = t.get("adapter_skew").within(0.0..=10.0).or(0.0);
    let slo = t.get::<String>("slo").optional().and_then(|text| {
        text.parse()
            .map_err(|error: String| {
                t.error(
                    "slo",
                    format!("`slo`: {error}"),
                    "write for example `slo = \"ttft=1s,itl=50ms\"`",
                );
            })
            .ok()
    });
    let [isl, osl, images, image_tokens] = read_dists(
        t,
        &[
            ("isl", 1024.0, 1.0..=TOKENS_MAX),
            ("osl", 128.0, 1.0..=TOKENS_MAX),
            ("images_per_request", 0.0, 0.0..=f64::from(IMAGES_MAX)),
            ("image_tokens", 1024.0, 1.0..=f64::from(IMAGE_TOKENS_MAX)),
        ],
    );
    let class = Class {
        name,
        weight,
        isl,
        osl,
        ignore_eos,
        priority,
        models,
        model_weights,
        adapters,
        adapter_skew,
        images,
        image_tokens,
        slo,
        prefix: t.array("prefix", |_, level| read_prefix(level)),
        session: t.table("session", read_session),
    };
    let shared: f64 = class.prefix.iter().map(|level| level.tokens.min()).sum();
    if shared >= class.isl.max() {
        t.error(
            "isl",
            format!(
                "`isl` is at most {} tokens, but the shared prefix alone has {shared} or more",
                class.isl.max()
            ),
            "increase `isl`, which is the length of the whole prompt, or shorten the prefix",
        );
    }
    class
}

fn read_prefix(level: &Table<'_>) -> PrefixLevel {
    let branches = level
        .get("branches")
        .within(1..=BRANCHES_MAX)
        .required("set the number of texts of this level: `branches = 8`", 1);
    let skew = level.get("skew").within(0.0..=10.0).or(0.0);
    let [tokens] = read_dists(level, &[("tokens", 256.0, 1.0..=TOKENS_MAX)]);
    PrefixLevel {
        branches,
        tokens,
        skew,
    }
}

fn read_session(t: &Table<'_>) -> SessionShape {
    let isl_max = t.get("isl_max").within(1..).optional();
    let [turns, think_time_s, user_tokens] = read_dists(
        t,
        &[
            ("turns", 1.0, 1.0..=TURNS_MAX),
            ("think_time_s", 0.0, 0.0..=THINK_TIME_S_MAX),
            ("user_tokens", 64.0, 1.0..=TOKENS_MAX),
        ],
    );
    SessionShape {
        turns,
        think_time_s,
        user_tokens,
        isl_max,
    }
}

/// The models of a class, and the weight of each.
fn read_models(t: &Table<'_>) -> (Vec<String>, Vec<f64>) {
    let models: Vec<String> = t
        .get("models")
        .check(
            |names: &Vec<String>| {
                let fits = |name: &String| !name.is_empty() && name.len() <= 256;
                let apart = (1..names.len()).all(|at| !names[..at].contains(&names[at]));
                names.len() <= 1024 && names.iter().all(fits) && apart
            },
            "up to 1,024 names of 1 to 256 bytes, each once",
        )
        .or(Vec::new());
    if models.is_empty() {
        t.unused("model_weights", "models", "there are no `models`");
        return (models, Vec::new());
    }
    let equal = vec![1.0; models.len()];
    let weights: Vec<f64> = t
        .get("model_weights")
        .check(
            |weights: &Vec<f64>| {
                let sound = |w: &f64| (0.0..=1e9).contains(w);
                weights.iter().all(sound) && weights.iter().any(|w| *w > 0.0)
            },
            "a list of numbers of 0 to 1e9, at least one of them above 0",
        )
        .or(equal.clone());
    if weights.len() != models.len() {
        t.error(
            "model_weights",
            format!(
                "`model_weights` has {} numbers, but `models` has {} names",
                weights.len(),
                models.len()
            ),
            "give each model one weight",
        );
        return (models, equal);
    }
    (models, weights)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload_file::{Bounds, Dist};

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
                "`arrival.rate_per_s` is 1e300, but must be above 0 and at most 1e9",
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
