//! Effective values and their origins.

use std::collections::HashMap;
use std::fmt::Write as _;

use slipstream_base::text::{acts, foreign};

use super::node::Origin;
use super::table::Scalar;

/// A step of a path.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Step {
    /// Key of a table.
    Key(String),
    /// Index into an array of tables.
    Index(usize),
}

/// A path in the usual notation: `pool.main.workers`, `event[0].at_s`.
pub(super) fn dotted(path: &[Step]) -> String {
    let mut out = String::new();
    for step in path {
        match step {
            Step::Key(key) => {
                if !out.is_empty() {
                    out.push('.');
                }
                out.push_str(key);
            }
            Step::Index(index) => write!(out, "[{index}]").expect("a String takes all"),
        }
    }
    out
}

/// A value that was read, or the default for one that was not set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// Path of the key, such as `pool.main.engine.block_size`.
    pub path: String,
    /// The value as TOML; `None` for an optional key that was not set.
    pub value: Option<String>,
    /// Its origin.
    pub origin: Origin,
    group: usize,
    key: String,
}

impl Setting {
    fn is_given(&self) -> bool {
        self.value.is_some() && self.origin.layer() > 0
    }
}

/// All settings of a document, in the order in which they were read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// Paths of tables, in the order of first use.
    groups: Vec<Vec<Step>>,
    /// Index into `groups`.
    group_of: HashMap<Vec<Step>, usize>,
    settings: Vec<Setting>,
}

impl Settings {
    /// The table at `path`, added if new.
    pub(super) fn group(&mut self, path: &[Step]) -> usize {
        if let Some(index) = self.group_of.get(path) {
            return *index;
        }
        self.groups.push(path.to_vec());
        self.group_of.insert(path.to_vec(), self.groups.len() - 1);
        self.groups.len() - 1
    }

    pub(super) fn record(&mut self, table: &[Step], key: &str, value: Option<String>, at: Origin) {
        let group = self.group(table);
        let mut path = table.to_vec();
        path.push(Step::Key(key.to_owned()));
        self.settings.push(Setting {
            path: dotted(&path),
            value,
            origin: at,
            group,
            key: key.to_owned(),
        });
    }

    /// All settings.
    pub fn iter(&self) -> std::slice::Iter<'_, Setting> {
        self.settings.iter()
    }

    /// The setting at `path`, such as `pool.main.workers`.
    pub fn get(&self, path: &str) -> Option<&Setting> {
        self.settings.iter().find(|s| s.path == path)
    }

    /// Replaces the value of `path` by `value` of `flag`. `path` has no indices: it means every item of an array.
    pub fn override_by_flag(&mut self, flag: &str, path: &str, value: &impl Scalar) {
        let groups = &self.groups;
        let keys = |group: usize| {
            groups[group].iter().filter_map(|step| match step {
                Step::Key(key) => Some(key.as_str()),
                Step::Index(_) => None,
            })
        };
        for setting in &mut self.settings {
            if keys(setting.group)
                .chain([&*setting.key])
                .eq(path.split('.'))
            {
                setting.value = Some(value.to_toml());
                setting.origin = Origin::Flag(flag.to_owned());
            }
        }
    }

    /// Settings with a value that a file, a variable or a flag set.
    pub fn given(&self) -> impl Iterator<Item = &Setting> {
        self.settings.iter().filter(|setting| setting.is_given())
    }

    /// The effective values as a TOML document with the same meaning; a comment after each value
    /// names its origin.
    pub fn to_toml(&self) -> String {
        self.render(&|_| true)
    }

    /// Only the values that a file, a variable or a flag set, in the form of [`to_toml`](Self::to_toml):
    /// a short document with the same meaning, as long as defaults do not change.
    pub fn given_to_toml(&self) -> String {
        self.render(&Setting::is_given)
    }

    fn render(&self, keep: &dyn Fn(&Setting) -> bool) -> String {
        const COMMENT_COLUMN: usize = 44;
        let mut out = String::new();
        let mut members: Vec<Vec<&Setting>> = vec![Vec::new(); self.groups.len()];
        for setting in self.settings.iter().filter(|setting| keep(setting)) {
            members[setting.group].push(setting);
        }
        let mut order: Vec<usize> = (0..self.groups.len()).collect();
        // Keys of no table must come before the first header; the rest keeps its order.
        order.sort_by_key(|group| !self.groups[*group].is_empty());
        for group in order {
            let path = &self.groups[group];
            let is_item = matches!(path.last(), Some(Step::Index(_)));
            // A table that contains only tables needs no header of its own.
            let is_parent = |g: &Vec<Step>| g.len() > path.len() && g.starts_with(path);
            let none_kept = || !self.settings.iter().any(|s| s.group == group && keep(s));
            let leaves_out = self.settings.iter().any(|s| s.group == group) && none_kept();
            let is_idle = leaves_out || self.groups.iter().any(is_parent);
            if members[group].is_empty() && !is_item && is_idle {
                continue;
            }
            if !path.is_empty() {
                if !out.is_empty() {
                    out.push('\n');
                }
                let keys: Vec<String> = path
                    .iter()
                    .filter_map(|step| match step {
                        Step::Key(key) => Some(key_to_toml(key)),
                        Step::Index(_) => None,
                    })
                    .collect();
                let keys = keys.join(".");
                let header = if is_item {
                    format!("[[{keys}]]")
                } else {
                    format!("[{keys}]")
                };
                out.push_str(&header);
                out.push('\n');
            }
            for setting in &members[group] {
                let line = match &setting.value {
                    Some(value) => format!("{} = {value}", key_to_toml(&setting.key)),
                    None => format!("# {} is not set", key_to_toml(&setting.key)),
                };
                let origin = comment(&setting.origin.to_string());
                if setting.value.is_some() {
                    writeln!(out, "{line:<COMMENT_COLUMN$}  # {origin}")
                } else {
                    writeln!(out, "{line}")
                }
                .expect("a String takes all");
            }
        }
        out
    }
}

impl<'s> IntoIterator for &'s Settings {
    type Item = &'s Setting;
    type IntoIter = std::slice::Iter<'s, Setting>;
    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

/// `text` for a TOML comment, which must not contain control characters.
fn comment(text: &str) -> String {
    foreign(text).into_owned()
}

fn key_to_toml(key: &str) -> String {
    let bare = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    if !key.is_empty() && key.chars().all(bare) {
        key.to_owned()
    } else {
        string_to_toml(key)
    }
}

/// `text` as a TOML basic string.
pub(super) fn string_to_toml(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\t' => out.push_str("\\t"),
            c if acts(c) => {
                write!(out, "\\U{:08X}", u32::from(c)).expect("a String takes all");
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}
