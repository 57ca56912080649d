//! Errors in a document, for users.

use std::fmt;

use slipstream_base::text::foreign;

use super::node::Origin;

/// One error: position, message and remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostic {
    /// Position of the value; [`Origin::Default`] for the document as a whole.
    pub at: Origin,
    /// The message, which names the key. Lower case, no final stop.
    pub message: String,
    /// The remedy.
    pub hint: Option<String>,
}

impl fmt::Display for Diagnostic {
    /// `cluster.toml:12:3: what` and, on a line of its own, `hint: how`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.at {
            Origin::Default | Origin::Preset(_) | Origin::Derived(_) => {}
            Origin::File { file, line, column } if *line > 0 => {
                write!(f, "{file}:{line}:{column}: ")?;
            }
            Origin::File { file, .. } => write!(f, "{file}: ")?,
            Origin::Env(_) | Origin::Set(_) | Origin::Flag(_) => write!(f, "{}: ", self.at)?,
        }
        f.write_str(&self.message)?;
        match &self.hint {
            Some(hint) => write!(f, "\nhint: {hint}"),
            None => Ok(()),
        }
    }
}

/// All errors of a document, in document order; at least one.
///
/// No value was built from the document; correct it and read it again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostics(Vec<Diagnostic>);

impl Diagnostics {
    /// Limit of printed errors; further ones are counted.
    const SHOWN_MAX: usize = 50;

    /// Sorts by position and removes duplicates. `None` if there are none.
    pub(super) fn collect(mut all: Vec<Diagnostic>) -> Option<Diagnostics> {
        all.sort_by_key(|m| m.at.position()); // stable: equal positions keep their order
        let mut kept: Vec<Diagnostic> = Vec::with_capacity(all.len());
        let mut start_of_place = 0;
        for mistake in all {
            if kept
                .last()
                .is_some_and(|k| k.at.position() != mistake.at.position())
            {
                start_of_place = kept.len();
            }
            if !kept[start_of_place..].contains(&mistake) {
                kept.push(mistake);
            }
        }
        (!kept.is_empty()).then_some(Diagnostics(kept))
    }

    /// A single error that was found outside of a document, such as a file that cannot be read.
    pub fn one(at: Origin, message: impl Into<String>, hint: Option<String>) -> Diagnostics {
        Diagnostics(vec![Diagnostic {
            at,
            message: message.into(),
            hint,
        }])
    }

    /// The errors, in document order.
    pub fn iter(&self) -> std::slice::Iter<'_, Diagnostic> {
        self.0.iter()
    }

    /// Number of errors; never 0.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.0.len()
    }
}

impl<'m> IntoIterator for &'m Diagnostics {
    type Item = &'m Diagnostic;
    type IntoIter = std::slice::Iter<'m, Diagnostic>;
    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl fmt::Display for Diagnostics {
    /// One error after the other, with `error: ` before each except the first, so that a program
    /// that prints `error: {diagnostics}` gets uniform blocks.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, mistake) in self.0.iter().take(Self::SHOWN_MAX).enumerate() {
            if index > 0 {
                f.write_str("\nerror: ")?;
            }
            write!(f, "{mistake}")?;
        }
        match self.0.len().saturating_sub(Self::SHOWN_MAX) {
            0 => Ok(()),
            more => write!(f, "\nerror: and {more} more errors"),
        }
    }
}

impl std::error::Error for Diagnostics {}

/// `text` for a one-line message: control characters escaped, truncated after 60 characters.
pub(super) fn shown(text: &str) -> String {
    const CHARS_MAX: usize = 60;
    match text.char_indices().nth(CHARS_MAX) {
        Some((end, _)) => format!("{}…", foreign(&text[..end])),
        None => foreign(text).into_owned(),
    }
}

/// The candidate nearest to `word`, if near enough for a hint: at most a third of the word's
/// letters inserted, deleted, replaced or swapped.
pub(super) fn nearest<'c>(
    word: &str,
    candidates: impl IntoIterator<Item = &'c str>,
) -> Option<&'c str> {
    const LETTERS_MAX: usize = 64; // longer words are never keys, and the cost is quadratic
    let word: Vec<char> = word.to_lowercase().chars().take(LETTERS_MAX + 1).collect();
    if word.is_empty() || word.len() > LETTERS_MAX {
        return None;
    }
    let bound = (word.len() / 3).max(1);
    candidates
        .into_iter()
        .map(|c| (edit_distance(&word, &c.chars().collect::<Vec<_>>()), c))
        .filter(|&(distance, _)| distance <= bound)
        .min_by_key(|&(distance, _)| distance)
        .map(|(_, c)| c)
}

/// The candidates that resemble `word`: that have it in their name, or that it has in its own; otherwise those of its
/// family and size ([`kin`]); otherwise [`nearest`].
pub(super) fn alike<'c>(word: &str, candidates: &[&'c str]) -> Vec<&'c str> {
    const SHOWN_MAX: usize = 4;
    // Shorter names are part of many words.
    const PART_MIN: usize = 3;
    const WHOLE_MIN: usize = 5;
    let lower = word.to_lowercase();
    // `meta-llama/Llama-3.1-8B-Instruct` is a folder and a name.
    let word = lower.rsplit('/').next().unwrap_or_default();
    let is_part = |candidate: &&&str| {
        let candidate = candidate.to_lowercase();
        word.len() >= PART_MIN && candidate.contains(word)
            || candidate.len() >= WHOLE_MIN && word.contains(&candidate)
    };
    let parts: Vec<&str> = candidates
        .iter()
        .filter(is_part)
        .take(SHOWN_MAX)
        .copied()
        .collect();
    if !parts.is_empty() {
        return parts;
    }
    let kin = kin(word, candidates);
    if !kin.is_empty() {
        return kin.into_iter().take(SHOWN_MAX).collect();
    }
    nearest(word, candidates.iter().copied())
        .into_iter()
        .collect()
}

/// The candidates of the same family as `word` that agree with it in most parts of the name, its size above all:
/// `llama-3.1-70b` and `llama-3.3-70b` for `llama3-70b`.
fn kin<'c>(word: &str, candidates: &[&'c str]) -> Vec<&'c str> {
    let of_word = name_parts(word);
    let scored = candidates.iter().filter_map(|candidate| {
        let of_candidate = name_parts(candidate);
        let family = of_candidate.first()?;
        of_word.contains(family).then_some(())?;
        let score: u32 = of_word
            .iter()
            .map(|part| agreement(part, &of_candidate))
            .sum();
        Some((score, *candidate))
    });
    let scored: Vec<(u32, &str)> = scored.collect();
    let best = scored.iter().map(|(score, _)| *score).max();
    let of_best = scored.iter().filter(|(score, _)| Some(*score) == best);
    of_best.map(|(_, candidate)| *candidate).collect()
}

/// How much a part of a name says if the `others` have it: sizes most, versions that begin alike least.
fn agreement(part: &str, others: &[String]) -> u32 {
    let is_size = part.ends_with('b') && part.starts_with(|c: char| c.is_ascii_digit());
    if others.iter().any(|other| other == part) {
        return if is_size { 4 } else { 2 };
    }
    let begins = |other: &String| {
        other
            .strip_prefix(part)
            .is_some_and(|rest| rest.starts_with('.'))
    };
    u32::from(others.iter().any(begins))
}

/// The parts of a model's or GPU's name in lower case: `meta/Llama3.1-70B` has `meta`, `llama`, `3.1` and `70b`. A
/// letter or two before a number belong to it, as in `h100`.
fn name_parts(name: &str) -> Vec<String> {
    let mut parts = Vec::new();
    let lower = name.to_lowercase();
    for word in lower.split(|c: char| !c.is_ascii_alphanumeric() && c != '.') {
        let letters = word.chars().take_while(char::is_ascii_alphabetic).count();
        let (family, rest) = word.split_at(letters);
        if letters >= 3 && rest.starts_with(|c: char| c.is_ascii_digit()) {
            parts.extend([family.to_owned(), rest.to_owned()]);
        } else if !word.is_empty() {
            parts.push(word.to_owned());
        }
    }
    parts
}

/// In words: the candidates that resemble `word`, or all of them if none does.
pub fn suggestion(word: &str, candidates: &[&str]) -> String {
    let alike = alike(word, candidates);
    if alike.is_empty() {
        return format!("one of {}", candidates.join(", "));
    }
    format!("did you mean {}?", alike.join(" or "))
}

/// Insertions, deletions, replacements and swaps of neighbors that turn `a` into `b` (optimal
/// string alignment).
fn edit_distance(a: &[char], b: &[char]) -> usize {
    let mut before_last = vec![0; b.len() + 1];
    let mut last: Vec<usize> = (0..=b.len()).collect();
    for (i, &ca) in a.iter().enumerate() {
        let mut row = vec![i + 1; b.len() + 1];
        for (j, &cb) in b.iter().enumerate() {
            row[j + 1] = (last[j] + usize::from(ca != cb))
                .min(last[j + 1] + 1)
                .min(row[j] + 1);
            if i > 0 && j > 0 && ca == b[j - 1] && a[i - 1] == cb {
                row[j + 1] = row[j + 1].min(before_last[j - 1] + 1);
            }
        }
        before_last = std::mem::replace(&mut last, row);
    }
    last[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_finds_slips_and_leaves_strangers_alone() {
        let keys = ["block_size", "max_num_seqs", "max_model_len", "gpu"];
        assert_eq!(nearest("blocksize", keys), Some("block_size"));
        assert_eq!(nearest("max_nmu_seqs", keys), Some("max_num_seqs"));
        assert_eq!(nearest("MAX_NUM_SEQS", keys), Some("max_num_seqs"));
        assert_eq!(nearest("gup", keys), Some("gpu"));
        assert_eq!(nearest("temperature", keys), None);
        assert_eq!(nearest(&"x".repeat(1 << 20), keys), None);
    }

    #[test]
    fn suggestions_know_parts_slips_and_folders() {
        let gpus = ["h100-sxm", "h100-pcie", "l40s", "l4"];
        assert_eq!(
            suggestion("H100", &gpus),
            "did you mean h100-sxm or h100-pcie?"
        );
        assert_eq!(suggestion("l40x", &gpus), "did you mean l40s?");
        assert_eq!(
            suggestion("abacus", &gpus),
            "one of h100-sxm, h100-pcie, l40s, l4"
        );
        assert_eq!(
            suggestion("", &gpus),
            "one of h100-sxm, h100-pcie, l40s, l4"
        );
        let models = ["llama-3.1-8b", "qwen3-8b"];
        assert_eq!(
            suggestion("meta-llama/llama3.1-8b", &models),
            "did you mean llama-3.1-8b?"
        );
        assert_eq!(
            suggestion("Llama-3.1-8B-Instruct", &models),
            "did you mean llama-3.1-8b?"
        );
    }

    #[test]
    fn suggestions_are_of_the_family_and_the_size() {
        let models = [
            "llama-3.1-8b",
            "llama-3.1-70b",
            "llama-2-70b",
            "qwen3-32b",
            "qwen2.5-72b",
            "llama-3.3-70b",
            "gpt-oss-20b",
        ];
        let check = |word: &str, expected: &[&str]| {
            assert_eq!(alike(word, &models), expected, "{word}");
        };
        check("llama3-70b", &["llama-3.1-70b", "llama-3.3-70b"]);
        check(
            "Meta-Llama-3-70B-Instruct",
            &["llama-3.1-70b", "llama-3.3-70b"],
        );
        check("llama3.1:8b", &["llama-3.1-8b"]);
        check("meta-llama/llama3-8b-instruct", &["llama-3.1-8b"]);
        check("llama-2-70b-chat-hf", &["llama-2-70b"]);
        check("Qwen/Qwen3-32B-FP8", &["qwen3-32b"]);
        check("qwen2.5-7b", &["qwen2.5-72b"]);
        let gpus = ["a100-sxm-80gb", "h100-sxm", "h100-pcie", "l40s", "rtx-4090"];
        assert_eq!(alike("rtx4090", &gpus), ["rtx-4090"]);
        assert_eq!(alike("nvidia-h100-sxm5", &gpus), ["h100-sxm"]);
        assert_eq!(alike("a100_80gb", &gpus), ["a100-sxm-80gb"]);
    }

    #[test]
    fn a_swap_is_one_edit() {
        let chars = |s: &str| s.chars().collect::<Vec<_>>();
        assert_eq!(edit_distance(&chars("abcd"), &chars("acbd")), 1);
        assert_eq!(edit_distance(&chars("kitten"), &chars("sitting")), 3);
        assert_eq!(edit_distance(&chars(""), &chars("abc")), 3);
    }
}
