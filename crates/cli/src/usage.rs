//! The command line: examples of each command, and mistakes in the words of the user.

use std::error::Error as _;
use std::ffi::OsString;
use std::process::exit;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, CommandFactory, FromArgMatches};

use crate::Cli;
use crate::examples;

/// The command, with examples in the help of its subcommands.
pub(crate) fn command() -> Command {
    examples::add(with_negative_numbers(Cli::command()))
}

/// Flags take `-3` as a value, so that its range is what is refused, and not an unknown flag `-3`.
fn with_negative_numbers(command: Command) -> Command {
    let names: Vec<String> = command
        .get_subcommands()
        .map(|sub| sub.get_name().to_owned())
        .collect();
    let command = command.mut_args(|arg| {
        let takes = arg.get_action().takes_values() && !arg.is_positional();
        if takes {
            arg.allow_negative_numbers(true)
        } else {
            arg
        }
    });
    names.into_iter().fold(command, |command, name| {
        command.mut_subcommand(name, with_negative_numbers)
    })
}

/// Parses the command line; ends the process with a message if it is wrong, or with the help that it asks for.
pub(crate) fn parse() -> Cli {
    let words: Vec<OsString> = std::env::args_os().collect();
    let mut command = command();
    let parsed = command
        .try_get_matches_from_mut(&words)
        .and_then(|matches| Cli::from_arg_matches(&matches));
    let error = match parsed {
        Ok(cli) => return cli,
        Err(error) => error.format(&mut command),
    };
    match explained(&error, &command, &words) {
        Some(text) => {
            errln!("{}", text.trim_end());
            exit(error.exit_code());
        }
        None => error.exit(),
    }
}

/// The message of `error` with its cause in our words, if there are better ones.
fn explained(error: &clap::Error, command: &Command, words: &[OsString]) -> Option<String> {
    let said = error.render().to_string();
    match error.kind() {
        ErrorKind::ValueValidation => {
            let value = text_of(error, ContextKind::InvalidValue)?;
            let cause = error.source()?.to_string();
            let flag = text_of(error, ContextKind::InvalidArg)?;
            let better = number_error(&value, &cause, flag.contains("TOKENS"))?;
            Some(said.replacen(&cause, &better, 1))
        }
        ErrorKind::UnknownArgument => {
            let word = text_of(error, ContextKind::InvalidArg)?;
            let of = subcommand(command, words);
            let tip = tip(&word, of)?;
            // Tips of clap name flags that look alike, and mean something else.
            let said: Vec<&str> = said
                .lines()
                .filter(|line| !line.trim_start().starts_with("tip:"))
                .collect();
            let (first, rest) = said.split_first()?;
            Some(format!(
                "{first}\n\n  tip: {tip}\n{}",
                rest.join("\n").trim_end()
            ))
        }
        ErrorKind::InvalidSubcommand => {
            let word = text_of(error, ContextKind::InvalidSubcommand)?;
            (word == "version").then(|| {
                "error: there is no command `version`\n\n  tip: slipstream --version\n".to_owned()
            })
        }
        _ => None,
    }
}

fn text_of(error: &clap::Error, kind: ContextKind) -> Option<String> {
    match error.get(kind)? {
        ContextValue::String(text) => Some(text.clone()),
        _ => None,
    }
}

/// The subcommand of the command line.
fn subcommand<'a>(command: &'a Command, words: &[OsString]) -> &'a Command {
    let mut of = command;
    for word in words.iter().skip(1).filter_map(|word| word.to_str()) {
        if let Some(next) = of.find_subcommand(word) {
            of = next;
        } else if !word.starts_with('-') {
            break;
        }
    }
    of
}

/// Why `value` is not a number that a flag takes. `cause`: what its parser said. `None`: that says enough.
fn number_error(value: &str, cause: &str, tokens: bool) -> Option<String> {
    if let Some((_, range)) = cause.split_once(" is not in ") {
        return Some(range_error(range));
    }
    let is_number = [
        "invalid digit",
        "invalid float",
        "too large",
        "too small",
        "cannot parse",
    ];
    if !is_number.iter().any(|words| cause.contains(words)) {
        return None;
    }
    let plain: String = value
        .chars()
        .filter(|c| !matches!(c, '_' | ',' | ' ' | '\''))
        .collect();
    if plain != value && plain.parse::<f64>().is_ok() {
        return Some(format!("write it without separators: {plain}"));
    }
    if let Some(digits) = value.strip_suffix(['k', 'K', 'm', 'M', 'g', 'G']) {
        let factor: f64 = match value.chars().last()?.to_ascii_lowercase() {
            'k' => 1e3,
            'm' => 1e6,
            _ => 1e9,
        };
        if let Ok(number) = digits.parse::<f64>() {
            let full = number * factor;
            let binary = if tokens && factor == 1e3 {
                format!(", or {} if k stands for 1,024", number * 1024.0)
            } else {
                String::new()
            };
            return Some(format!("write the number in full: {full}{binary}"));
        }
    }
    match value.parse::<f64>() {
        Ok(number) if number < 0.0 => Some("it must not be negative".into()),
        Ok(number) if number.fract() != 0.0 => Some("it must be a whole number".into()),
        Ok(_) => Some("the number is too large".into()),
        Err(_) => Some("it is not a number".into()),
    }
}

/// `range` in words: clap writes `1..18446744073709551615` and `1..=100`.
fn range_error(range: &str) -> String {
    let (low, high) = range.split_once("..").unwrap_or((range, ""));
    let inclusive = high.strip_prefix('=');
    match (inclusive, high.parse::<u64>()) {
        (Some(high), _) => format!("it must be {low} to {high}"),
        (None, Ok(high)) if high < i64::MAX as u64 => format!("it must be {low} to {}", high - 1),
        _ => format!("it must be at least {low}"),
    }
}

/// Flags of vLLM that are keys of a cluster file.
const ENGINE_KEYS: [&str; 10] = [
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "block_size",
    "gpu_memory_utilization",
    "enable_prefix_caching",
    "enable_chunked_prefill",
];

/// A tip about an unknown argument of `command`.
fn tip(word: &str, command: &Command) -> Option<String> {
    let has = |flag: &str| {
        command
            .get_arguments()
            .any(|arg| arg.get_long() == Some(flag))
    };
    if let Some(flag) = word.strip_prefix("--") {
        let flag = flag.split('=').next().unwrap_or_default();
        let key = flag.replace('-', "_");
        if has("set") && ENGINE_KEYS.contains(&key.as_str()) {
            return Some(format!(
                "that is a key of the cluster file here: --set engine.{key}=VALUE"
            ));
        }
        let known = match flag {
            "tokenizer" if has("set") => "--set model.tokenizer=FOLDER",
            "api-key" if command.get_name() == "serve" => {
                "keys are in the environment, or in live.api_keys_file: SLIPSTREAM_API_KEYS=KEY slipstream serve"
            }
            "base-url" if command.get_name() == "bench" => {
                "the server is the first argument: slipstream bench URL"
            }
            "num-prompts" if has("requests") => "--requests N",
            "request-rate" | "qps" if has("rate") => "--rate PER_S",
            "input-len" | "random-input-len" | "prompt-tokens" if has("isl") => "--isl TOKENS",
            "output-len" | "random-output-len" | "output-tokens" if has("osl") => "--osl TOKENS",
            "max-concurrency" if has("concurrency") => "--concurrency N",
            "dataset-path" if has("trace") => "--trace FILE",
            _ => return None,
        };
        return Some(known.into());
    }
    if word.starts_with('-') {
        return matches!(word, "-v" | "-V")
            .then(|| "slipstream --version prints the version".into());
    }
    let ending = word
        .rsplit('.')
        .next()
        .unwrap_or_default()
        .to_ascii_lowercase();
    match ending.as_str() {
        "jsonl" | "csv" if has("trace") => Some(format!("a trace has a flag: --trace {word}")),
        "toml" if has("workload") => Some(format!("a workload file has a flag: --workload {word}")),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The message for a command line that is wrong.
    fn refused(line: &str) -> String {
        let words: Vec<OsString> = line.split(' ').map(OsString::from).collect();
        let mut command = command();
        let parsed = command.try_get_matches_from_mut(&words);
        let error = parsed.and_then(|matches| Cli::from_arg_matches(&matches));
        let error = error.err().unwrap_or_else(|| panic!("{line} is right"));
        let error = error.format(&mut command);
        explained(&error, &command, &words).unwrap_or_else(|| error.render().to_string())
    }

    #[test]
    fn numbers_are_refused_in_words() {
        let check = |line: &str, flag: &str, words: &str| {
            let said = refused(line);
            assert!(
                said.contains(flag) && said.contains(words),
                "{line}: {said}"
            );
        };
        check(
            "slipstream simulate --isl 1k",
            "--isl",
            "in full: 1000, or 1024 if",
        );
        check("slipstream simulate --rate 10k", "--rate", "in full: 10000");
        check(
            "slipstream simulate --requests 1.5M",
            "--requests",
            "in full: 1500000",
        );
        check(
            "slipstream simulate --requests 10,000",
            "--requests",
            "separators: 10000",
        );
        check(
            "slipstream simulate --requests 1.5",
            "--requests",
            "a whole number",
        );
        check("slipstream simulate --rate abc", "--rate", "not a number");
        check(
            "slipstream simulate --requests 0",
            "--requests",
            "at least 1",
        );
        check("slipstream simulate --isl -5", "--isl", "1 to 100000000");
        check("slipstream simulate --seed -1", "--seed", "not be negative");
        check("slipstream init --workers 4096", "--workers", "1 to 1024");
        check(
            "slipstream sweep --vary a=1 --jobs -2",
            "--jobs",
            "1 to 1024",
        );
    }

    /// Every flag with a number of every command, with values of each kind that is none.
    #[test]
    fn every_number_is_refused_by_its_flag() {
        fn visit(command: &Command, path: &str, tried: &mut u32) {
            for sub in command.get_subcommands() {
                visit(sub, &format!("{path} {}", sub.get_name()), tried);
            }
            let numbers = ["N", "TOKENS", "PER_S", "FACTOR", "BYTES"];
            for arg in command.get_arguments() {
                let name = arg.get_value_names().and_then(|names| names.first());
                let (Some(flag), Some(name)) = (arg.get_long(), name) else {
                    continue;
                };
                if !numbers.contains(&name.as_str()) {
                    continue;
                }
                for value in ["1k", "x", "", "1e"] {
                    let words = format!("{path} --{flag}={value}");
                    let said = refused(&words);
                    assert!(said.contains(&format!("--{flag}")), "{words}: {said}");
                    for jargon in [
                        "invalid digit",
                        "invalid float",
                        "is not in",
                        "cannot parse",
                    ] {
                        assert!(!said.contains(jargon), "{words}: {said}");
                    }
                    *tried += 1;
                }
            }
        }
        let mut tried = 0;
        visit(&command(), "slipstream", &mut tried);
        assert!(tried > 100, "{tried}");
    }

    #[test]
    fn arguments_of_other_tools_get_a_tip() {
        let check = |line: &str, words: &str| {
            let said = refused(line);
            assert!(said.contains(words), "{line}: {said}");
        };
        check(
            "slipstream simulate cluster.toml t.jsonl",
            "--trace t.jsonl",
        );
        check(
            "slipstream simulate cluster.toml w.toml",
            "--workload w.toml",
        );
        check(
            "slipstream serve --max-num-seqs 8",
            "--set engine.max_num_seqs=",
        );
        check(
            "slipstream serve --tensor-parallel-size=2",
            "engine.tensor_parallel_size=",
        );
        check("slipstream bench http://a --num-prompts 5", "--requests N");
        check("slipstream version", "slipstream --version");
        check("slipstream -v", "--version");
        check("slipstream serve --nonsense", "--nonsense");
    }
}
