//! Examples at the end of each command's help.

use std::fmt::Write as _;

use clap::Command;

/// Command lines and what they do, by command.
const EXAMPLES: &[(&str, &[(&str, &str)])] = &[
    (
        "demo",
        &[
            ("slipstream demo", "about a minute"),
            ("slipstream demo --short", "a fifth of that"),
        ],
    ),
    (
        "init",
        &[
            ("slipstream init", "qwen3-8b on h100-sxm"),
            (
                "slipstream init --model llama-3.1-70b --gpu h200-sxm --rate 12 --dir mine",
                "your choice",
            ),
        ],
    ),
    (
        "serve",
        &[
            (
                "slipstream serve",
                "modelled engines of the defaults, on 127.0.0.1:8000",
            ),
            (
                "slipstream serve cluster.toml --port 9000 --speedup 10",
                "a cluster file, ten times as fast",
            ),
            (
                "slipstream serve --engine http://gpu1:8000 --engine http://gpu2:8000",
                "a router in front of two vLLM",
            ),
        ],
    ),
    (
        "frontend",
        &[(
            "slipstream frontend cluster.toml",
            "the HTTP side of a cluster file with [planes]",
        )],
    ),
    (
        "worker",
        &[(
            "slipstream worker cluster.toml",
            "its engines, in a process of their own",
        )],
    ),
    (
        "simulate",
        &[
            (
                "slipstream simulate --rate 4 --isl 1000 --osl 200",
                "the default cluster",
            ),
            (
                "slipstream simulate cluster.toml -w workload.toml --slo ttft=1s,itl=50ms --html run.html",
                "goodput, and a page",
            ),
            (
                "slipstream simulate cluster.toml --trace conversation_trace.jsonl --requests 1000",
                "the beginning of a trace",
            ),
        ],
    ),
    (
        "sweep",
        &[
            (
                "slipstream sweep cluster.toml -w workload.toml --vary pool.main.workers=2..6",
                "five sizes",
            ),
            (
                "slipstream sweep cluster.toml -w workload.toml --vary load=0.5,1,2 --slo ttft=1s --attain 99%",
                "what each load needs",
            ),
        ],
    ),
    (
        "plan",
        &[
            (
                "slipstream plan --rate 4 --isl 1000 --osl 200 --model llama-3.1-8b --slo ttft=1s,itl=50ms",
                "a load in numbers",
            ),
            (
                "slipstream plan trace.jsonl --model llama-3.1-70b --gpus h100-sxm,l40s --price h100-sxm=2.5 --price l40s=0.9 --slo ttft=10s,itl=50ms",
                "a trace, by cost",
            ),
        ],
    ),
    (
        "predict",
        &[(
            "slipstream predict deployments.csv",
            "one row per deployment (docs/accuracy.md)",
        )],
    ),
    (
        "calibrate",
        &[(
            "slipstream calibrate --help",
            "fits a profile to measurements (docs/calibrate.md)",
        )],
    ),
    (
        "drag",
        &[
            (
                "slipstream drag cluster.toml --rate 5 --duration 10s --speedup auto",
                "where live and simulated differ",
            ),
            (
                "slipstream drag --engine http://gpu1:8000 cluster.toml --rate 2",
                "a running vLLM against its twin",
            ),
        ],
    ),
    (
        "sched",
        &[(
            "slipstream sched --help",
            "the CPU scheduler (docs/sched.md)",
        )],
    ),
    (
        "bench",
        &[
            (
                "slipstream bench http://127.0.0.1:8000 --rate 4 --isl 1000 --osl 200",
                "a steady load",
            ),
            (
                "slipstream bench http://127.0.0.1:8000 -w workload.toml --slo ttft=1s,itl=50ms --out a.json",
                "a workload file, saved",
            ),
            (
                "slipstream bench http://127.0.0.1:8000 --sweep --rate 4 --duration 30s --slo ttft=1s,itl=50ms",
                "the highest rate within objectives",
            ),
            ("slipstream bench compare a.json b.json", "two saved runs"),
        ],
    ),
    (
        "trace",
        &[(
            "slipstream trace stats conversation_trace.jsonl",
            "rates, lengths and shared prefixes",
        )],
    ),
    (
        "tokenizer",
        &[(
            "slipstream tokenizer --help",
            "exports, renders and compares",
        )],
    ),
    ("presets", &[("slipstream presets", "models and GPUs")]),
    (
        "describe",
        &[(
            "slipstream describe http://gpu1:8000 http://gpu2:8000",
            "prints a cluster file",
        )],
    ),
    (
        "top",
        &[(
            "slipstream top http://127.0.0.1:8000",
            "once a second, until Ctrl-C",
        )],
    ),
    (
        "events",
        &[(
            "slipstream events tail --endpoint tcp://gpu1:5557",
            "KV events of a vLLM",
        )],
    ),
    (
        "net",
        &[(
            "slipstream net run examples/net/roce-incast.toml --html net.html",
            "one network, with a page",
        )],
    ),
    ("doctor", &[("slipstream doctor", "checks this host")]),
    (
        "completions",
        &[(
            "mkdir -p ~/.local/share/bash-completion/completions && slipstream completions bash > ~/.local/share/bash-completion/completions/slipstream",
            "",
        )],
    ),
    (
        "man",
        &[(
            "slipstream man ~/.local/share/man/man1",
            "one page per command",
        )],
    ),
];

/// Adds the examples to the help of the subcommands of `command`.
pub(crate) fn add(command: Command) -> Command {
    EXAMPLES.iter().fold(command, |command, (name, examples)| {
        let mut text = String::from("Examples:\n");
        for (line, what) in *examples {
            let _ = writeln!(text, "  {line}");
            if !what.is_empty() {
                let _ = writeln!(text, "      {what}");
            }
        }
        command.mut_subcommand(name, |sub| sub.after_help(text.trim_end().to_owned()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_command_has_examples_that_parse() {
        let command = crate::usage::command();
        for sub in command.get_subcommands() {
            let examples = EXAMPLES.iter().find(|(name, _)| *name == sub.get_name());
            assert!(examples.is_some(), "{} has none", sub.get_name());
        }
        for (name, examples) in EXAMPLES {
            for (line, _) in *examples {
                let line = line.split(" && ").last().unwrap();
                let line = line.split(" > ").next().unwrap();
                assert!(line.starts_with(&format!("slipstream {name}")), "{line}");
                if line.ends_with("--help") {
                    continue;
                }
                let parsed = command.clone().try_get_matches_from(line.split(' '));
                assert!(parsed.is_ok(), "{line}: {}", parsed.unwrap_err());
            }
        }
    }
}
