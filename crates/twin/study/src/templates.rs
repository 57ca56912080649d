//! Templates of files that deploy a plan's answer: vLLM's commands, values of the Helm chart, or a folder of one's own.
//!
//! A template is a file `NAME.jinja`, which becomes `NAME`. All get the same context
//! ([`Answer::deployment`](crate::plan::Answer::deployment)). A name that the context lacks is an error.

use std::path::Path;

use anyhow::{Context as _, bail, ensure};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, Value};
use minijinja::{AutoEscape, Environment, UndefinedBehavior};

/// Largest template, bytes.
const TEMPLATE_BYTES_MAX: u64 = 1 << 20;
/// Most templates of a folder.
const TEMPLATES_MAX: usize = 100;

/// Ending of templates.
const ENDING: &str = ".jinja";

/// A set of templates.
#[derive(Clone, Debug)]
pub struct Templates {
    /// Name without ending, and text.
    files: Vec<(String, String)>,
}

/// A file to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RenderedFile {
    /// Its name.
    pub name: String,
    /// Its content.
    pub text: String,
    /// Whether it is a script, which can be run.
    pub is_script: bool,
}

/// Names of the sets in the binary, with their files.
const BUILTIN: &[(&str, &[(&str, &str)])] = &[
    (
        "vllm",
        &[
            (
                "README.md",
                include_str!("../templates/vllm/README.md.jinja"),
            ),
            (
                "engine.sh",
                include_str!("../templates/vllm/engine.sh.jinja"),
            ),
            (
                "router.sh",
                include_str!("../templates/vllm/router.sh.jinja"),
            ),
            (
                "router.toml",
                include_str!("../templates/vllm/router.toml.jinja"),
            ),
        ],
    ),
    (
        "helm",
        &[
            (
                "README.md",
                include_str!("../templates/helm/README.md.jinja"),
            ),
            (
                "install.sh",
                include_str!("../templates/helm/install.sh.jinja"),
            ),
            (
                "values.yaml",
                include_str!("../templates/helm/values.yaml.jinja"),
            ),
            (
                "vllm.yaml",
                include_str!("../templates/helm/vllm.yaml.jinja"),
            ),
        ],
    ),
];

impl Templates {
    /// The set called `target`, or the templates in the folder of that path.
    ///
    /// # Errors
    /// If it is neither, or a template cannot be read.
    pub fn load(target: &str) -> anyhow::Result<Templates> {
        if let Some((_, files)) = BUILTIN.iter().find(|(name, _)| *name == target) {
            let files = files.iter();
            return Ok(Templates {
                files: files
                    .map(|(name, text)| ((*name).into(), (*text).into()))
                    .collect(),
            });
        }
        let folder = Path::new(target);
        ensure!(
            folder.is_dir(),
            "--emit {target}: that is no target; targets are vllm, helm, and folders with templates (*{ENDING}, docs/plan.md)"
        );
        let templates = Templates::of_folder(folder).with_context(|| format!("--emit {target}"))?;
        templates.check()?;
        Ok(templates)
    }

    fn of_folder(folder: &Path) -> anyhow::Result<Templates> {
        let mut files = Vec::new();
        for entry in std::fs::read_dir(folder)? {
            let entry = entry?;
            let name = entry.file_name();
            let Some(name) = name.to_str().and_then(|name| name.strip_suffix(ENDING)) else {
                continue;
            };
            let path = entry.path();
            let about = std::fs::metadata(&path)?;
            ensure!(about.is_file(), "{} is no file", path.display());
            ensure!(
                about.len() <= TEMPLATE_BYTES_MAX,
                "{} has more than {TEMPLATE_BYTES_MAX} bytes",
                path.display()
            );
            ensure!(
                !name.is_empty(),
                "{} has no name before {ENDING}",
                path.display()
            );
            let text = std::fs::read_to_string(&path);
            let text = text.with_context(|| path.display().to_string())?;
            files.push((name.to_owned(), text));
            ensure!(
                files.len() <= TEMPLATES_MAX,
                "more than {TEMPLATES_MAX} templates"
            );
        }
        if files.is_empty() {
            bail!("the folder has no template (*{ENDING}, docs/plan.md)");
        }
        files.sort();
        Ok(Templates { files })
    }

    /// Refuses templates that are not valid, before the work whose result they show.
    fn check(&self) -> anyhow::Result<()> {
        let environment = environment();
        for (name, text) in &self.files {
            let whole = format!("{name}{ENDING}");
            let parsed = environment.template_from_named_str(&whole, text);
            parsed.map_err(|error| anyhow::anyhow!("template {whole}: {error:#}"))?;
        }
        Ok(())
    }

    /// The files for a deployment.
    ///
    /// # Errors
    /// Of a template, with its name and line.
    pub fn render(&self, deployment: &serde_json::Value) -> anyhow::Result<Vec<RenderedFile>> {
        let environment = environment();
        let fields = Value::from(Serde(deployment));
        let render = |(name, text): &(String, String)| {
            let whole = format!("{name}{ENDING}");
            let template = environment.template_from_named_str(&whole, text);
            let text = template.and_then(|of| of.render(fields.clone()));
            // The cause has the name that the context lacks.
            let text = text.map_err(|error| anyhow::anyhow!("template {whole}: {error:#}"))?;
            anyhow::Ok(RenderedFile {
                name: name.clone(),
                is_script: text.starts_with("#!"),
                text,
            })
        };
        self.files.iter().map(render).collect()
    }
}

/// Jinja as the templates are written in: a missing name is an error, and lines of tags leave no empty lines.
fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_undefined_behavior(UndefinedBehavior::Strict);
    environment.set_syntax(
        SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .keep_trailing_newline(true)
            .build()
            .expect("the delimiters are the default ones"),
    );
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.add_filter("sh", shell_word);
    environment.add_filter("pod", pod_argument);
    environment
}

/// Text as one word of a POSIX shell; `${NAME}` in it is expanded.
fn shell_word(text: &str) -> String {
    let mut out = String::new();
    for (part, is_variable) in parts(text) {
        if is_variable {
            out.extend(["\"${", part, "}\""]);
        } else if !part.is_empty() {
            let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,+@%".contains(c);
            if part.chars().all(is_plain) {
                out += part;
            } else {
                out.extend(["'", &part.replace('\'', r"'\''"), "'"]);
            }
        }
    }
    if out.is_empty() { "''".into() } else { out }
}

/// Text as a JSON string, and so YAML, that is an argument of a container: `${NAME}` in it becomes `$(NAME)`, a variable of its
/// environment. Kubernetes takes `$$` for `$`.
fn pod_argument(text: &str) -> String {
    let mut out = String::new();
    for (part, is_variable) in parts(text) {
        if is_variable {
            out.extend(["$(", part, ")"]);
        } else {
            out += &part.replace('$', "$$");
        }
    }
    serde_json::Value::from(out).to_string()
}

/// Text between variables `${NAME}`, and their names.
fn parts(text: &str) -> Vec<(&str, bool)> {
    let mut parts = Vec::new();
    let (mut begin, mut at) = (0, 0);
    while let Some(found) = text[at..].find("${") {
        let start = at + found;
        match variable(&text[start + 2..]) {
            Some(name) => {
                parts.push((&text[begin..start], false));
                parts.push((name, true));
                begin = start + 2 + name.len() + 1;
                at = begin;
            }
            None => at = start + 2,
        }
    }
    parts.push((&text[begin..], false));
    parts
}

/// The name of the variable whose `${` is before `text`.
fn variable(text: &str) -> Option<&str> {
    let (name, _) = text.split_once('}')?;
    let is_of_one = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
    let begins = name.starts_with(|c: char| c.is_ascii_uppercase());
    (begins && name.chars().all(is_of_one)).then_some(name)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use proptest::prelude::*;

    use super::*;

    /// Any text, often with what shells, Kubernetes and templates read specially.
    fn texts() -> impl Strategy<Value = Vec<String>> {
        let odd = prop::sample::select(vec![
            "$(A)", "${A", "${a}", "$$", "'", "\"", "\\", "`x`", "\n", "{{", "é", " ", "$A",
        ]);
        let piece = prop_oneof![2 => odd.prop_map(str::to_owned), 1 => "[ -~]{0,4}"];
        let text = prop::collection::vec(piece, 0..6).prop_map(|pieces| pieces.concat());
        let text = text.prop_filter("has a variable", |text| parts(text).len() == 1);
        prop::collection::vec(text, 1..30)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(if std::env::var("PROPTEST_CASES").is_ok() {
            ProptestConfig::default().cases
        } else {
            32
        }))]

        #[test]
        fn words_are_words_of_a_shell(texts in texts()) {
            // Each with a variable at its end, which is replaced.
            let words: Vec<String> = texts.iter().map(|text| shell_word(&format!("{text}${{V}}"))).collect();
            let script = format!("V='a b'; printf '%s\\0' {}", words.join(" "));
            let output = Command::new("sh").arg("-c").arg(&script).output().unwrap();
            let got: Vec<&[u8]> = output.stdout.split(|&byte| byte == 0).collect();
            let wanted: Vec<String> = texts.iter().map(|text| format!("{text}a b")).collect();
            let wanted: Vec<&[u8]> = wanted.iter().map(String::as_bytes).chain([&b""[..]]).collect();
            prop_assert_eq!(got, wanted, "{}", script);
        }

        /// By the rules of Kubernetes: `$$(` is `$(`, and `$(NAME)` the variable.
        #[test]
        fn arguments_of_pods_are_what_they_were(texts in texts()) {
            for text in texts {
                let json = pod_argument(&format!("{text}${{V}}"));
                let argument: String = serde_json::from_str(&json).unwrap();
                let body = argument.strip_suffix("$(V)").unwrap();
                prop_assert_eq!(expanded(body), text);
            }
        }
    }

    /// `expand` of Kubernetes (`third_party/forked/golang/expansion`) without variables that are defined.
    fn expanded(text: &str) -> String {
        let mut out = String::new();
        let mut rest = text;
        while let Some(at) = rest.find('$') {
            out += &rest[..at];
            let after = &rest[at + 1..];
            match after.chars().next() {
                Some('$') => {
                    out.push('$');
                    rest = &after[1..];
                }
                Some('(') if after.contains(')') => panic!("a variable in {text}"),
                Some(other) => {
                    out.push('$');
                    out.push(other);
                    rest = &after[other.len_utf8()..];
                }
                None => {
                    out.push('$');
                    rest = after;
                }
            }
        }
        out + rest
    }

    #[test]
    fn variables_have_names_of_variables() {
        assert_eq!(shell_word("a${MODEL_2}b"), r#"a"${MODEL_2}"b"#);
        assert_eq!(shell_word("${model}"), "'${model}'");
        assert_eq!(shell_word(""), "''");
        assert_eq!(pod_argument("${A}"), r#""$(A)""#);
    }
}
