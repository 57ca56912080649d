//! Whether a JSON value satisfies a schema.

use std::collections::{BTreeSet, HashMap, HashSet};

use regex_syntax::hir::{Class, Hir, HirKind, Look};

use crate::equality::{canonical, same};
use crate::keywords::{is_of, number, target, types_of, weight};
use crate::{DEPTH_MAX, FormError, Tree, WORK_MAX, pattern};

/// Checks values against schemas, without knowledge of how a value was made. `format` is an annotation here, and
/// `oneOf` needs one branch at least.
pub(crate) struct Judge<'a> {
    pub(crate) root: &'a Tree,
    /// The keyword of the outermost schema that the value is from: it holds.
    pub(crate) given: Option<&'a str>,
    /// Pairs of a value and a schema that were checked, and work of about that size.
    pub(crate) work: u32,
    patterns: HashMap<String, Hir>,
    /// Canonical texts of the values of long `enum`s, by the address of those. Schemas outlive the judge's calls.
    enums: HashMap<usize, HashSet<String>>,
    pub(crate) path: Vec<String>,
    /// Path and keyword of the last value that failed outside of a branch.
    pub(crate) missed: Option<(Vec<String>, &'static str)>,
}

impl<'a> Judge<'a> {
    pub(crate) fn new(root: &'a Tree) -> Judge<'a> {
        Judge {
            root,
            given: None,
            work: 0,
            patterns: HashMap::new(),
            enums: HashMap::new(),
            path: Vec::new(),
            missed: None,
        }
    }

    fn spend(&mut self, work: usize) -> Result<(), FormError> {
        self.work = self
            .work
            .saturating_add(u32::try_from(work).unwrap_or(u32::MAX));
        if self.work > WORK_MAX {
            return Err(FormError::at(
                &self.path,
                "the JSON that the schema demands takes too long to check",
            ));
        }
        Ok(())
    }

    fn miss(&mut self, name: &'static str) -> bool {
        self.missed = Some((self.path.clone(), name));
        false
    }

    /// Whether `value` satisfies `schema`.
    pub(crate) fn satisfies(
        &mut self,
        value: &Tree,
        schema: &Tree,
        depth: u32,
    ) -> Result<bool, FormError> {
        self.spend(1)?;
        let members = match schema {
            Tree::Object(members) => members,
            Tree::Bool(false) => return Ok(self.miss("false")),
            _ => return Ok(true),
        };
        // References that only lead to each other hold for nothing.
        if depth > 2 * DEPTH_MAX {
            return Ok(self.miss("$ref"));
        }
        let types = types_of(schema);
        if !types.is_empty() && !types.iter().any(|name| is_of(value, name)) {
            return Ok(self.miss("type"));
        }
        for (name, demand) in members {
            if depth == 0 && self.given == Some(name) {
                continue;
            }
            match (name.as_str(), demand) {
                ("$ref", to) => {
                    let root = self.root;
                    let Some(to) = target(root, to.as_text().unwrap_or_default()) else {
                        return Ok(self.miss("$ref"));
                    };
                    if !self.satisfies(value, to, depth + 1)? {
                        return Ok(false);
                    }
                }
                ("const", demand) => {
                    self.spend(weight(demand) as usize / 16)?;
                    if !same(value, demand) {
                        return Ok(self.miss("const"));
                    }
                }
                ("enum", Tree::Array(values)) => {
                    let found = if values.len() < 16 {
                        values.iter().any(|one| same(value, one))
                    } else {
                        let place = values.as_ptr() as usize;
                        if !self.enums.contains_key(&place) {
                            self.spend(values.len() / 4)?;
                            let set = values.iter().map(canonical).collect();
                            self.enums.insert(place, set);
                        }
                        self.enums[&place].contains(&canonical(value))
                    };
                    if !found {
                        return Ok(self.miss("enum"));
                    }
                }
                ("allOf", Tree::Array(all)) => {
                    for one in all {
                        if !self.satisfies(value, one, depth + 1)? {
                            return Ok(false);
                        }
                    }
                }
                ("anyOf" | "oneOf", Tree::Array(branches)) => {
                    let length = self.path.len();
                    let mut found = false;
                    for one in branches {
                        found = self.satisfies(value, one, depth + 1)?;
                        self.path.truncate(length);
                        if found {
                            break;
                        }
                    }
                    if !found {
                        return Ok(self.miss(if name == "anyOf" { "anyOf" } else { "oneOf" }));
                    }
                }
                _ => {}
            }
        }
        match value {
            Tree::Number(n) => Ok(self.number(number(n), schema)),
            Tree::Text(text) => self.text(text, schema),
            Tree::Array(elements) => self.array(elements, schema, depth),
            Tree::Object(members) => self.object(members, value, schema, depth),
            Tree::Null | Tree::Bool(_) => Ok(true),
        }
    }

    fn number(&mut self, value: f64, schema: &Tree) -> bool {
        let bound = |name| match schema.get(name) {
            Some(Tree::Number(n)) => Some(number(n)),
            _ => None,
        };
        for (name, right) in [
            ("minimum", bound("minimum").is_none_or(|b| value >= b)),
            ("maximum", bound("maximum").is_none_or(|b| value <= b)),
            (
                "exclusiveMinimum",
                bound("exclusiveMinimum").is_none_or(|b| value > b),
            ),
            (
                "exclusiveMaximum",
                bound("exclusiveMaximum").is_none_or(|b| value < b),
            ),
            (
                "multipleOf",
                bound("multipleOf").is_none_or(|b| (value / b).fract() == 0.0),
            ),
        ] {
            if !right {
                return self.miss(name);
            }
        }
        true
    }

    /// Whether `count` is within the keywords `least` and `most` of `schema`.
    fn counts(
        &mut self,
        count: usize,
        schema: &Tree,
        least: &'static str,
        most: &'static str,
    ) -> bool {
        let bound = |name| match schema.get(name) {
            Some(Tree::Number(n)) => Some(number(n)),
            _ => None,
        };
        if bound(least).is_some_and(|b| (count as f64) < b) {
            return self.miss(least);
        }
        if bound(most).is_some_and(|b| count as f64 > b) {
            return self.miss(most);
        }
        true
    }

    fn text(&mut self, text: &str, schema: &Tree) -> Result<bool, FormError> {
        self.spend(text.len() / 64)?;
        if !self.counts(text.chars().count(), schema, "minLength", "maxLength") {
            return Ok(false);
        }
        if let Some(pattern) = schema.get("pattern").and_then(Tree::as_text)
            && !self.matches(pattern, text)?
        {
            return Ok(self.miss("pattern"));
        }
        Ok(true)
    }

    fn array(&mut self, elements: &[Tree], schema: &Tree, depth: u32) -> Result<bool, FormError> {
        if !self.counts(elements.len(), schema, "minItems", "maxItems") {
            return Ok(false);
        }
        let first: &[Tree] = match schema.get("prefixItems") {
            Some(Tree::Array(first)) => first,
            _ => &[],
        };
        let rest = schema.get("items");
        let mut seen = HashSet::new();
        let unique = schema.get("uniqueItems") == Some(&Tree::Bool(true));
        for (at, element) in elements.iter().enumerate() {
            if let Some(item) = first.get(at).or(rest) {
                self.path.push(at.to_string());
                if !self.satisfies(element, item, depth + 1)? {
                    return Ok(false);
                }
                self.path.pop();
            }
            if unique && !seen.insert(canonical(element)) {
                return Ok(self.miss("uniqueItems"));
            }
        }
        Ok(true)
    }

    fn object(
        &mut self,
        members: &[(String, Tree)],
        value: &Tree,
        schema: &Tree,
        depth: u32,
    ) -> Result<bool, FormError> {
        if !self.counts(members.len(), schema, "minProperties", "maxProperties") {
            return Ok(false);
        }
        if let Some(Tree::Array(names)) = schema.get("required") {
            let mut names = names.iter().filter_map(Tree::as_text);
            if !names.all(|name| value.get(name).is_some()) {
                return Ok(self.miss("required"));
            }
        }
        let properties = schema.get("properties");
        let rest = schema.get("additionalProperties");
        for (name, value) in members {
            let own = properties.and_then(|all| all.get(name));
            if let Some(demand) = own.or(rest) {
                self.path.push(name.clone());
                if !self.satisfies(value, demand, depth + 1)? {
                    return Ok(false);
                }
                self.path.pop();
            }
        }
        if let Some(demand) = schema.get("unevaluatedProperties") {
            let mut known = HashSet::new();
            self.evaluated(value, schema, depth, &mut known)?;
            for (name, value) in members {
                if !known.contains(name) && !self.satisfies(value, demand, depth + 1)? {
                    return Ok(self.miss("unevaluatedProperties"));
                }
            }
        }
        Ok(true)
    }

    /// Adds the names of members of `value` that `schema`, which `value` satisfies, evaluates.
    fn evaluated(
        &mut self,
        value: &Tree,
        schema: &Tree,
        depth: u32,
        known: &mut HashSet<String>,
    ) -> Result<(), FormError> {
        self.spend(1)?;
        let (Tree::Object(members), Tree::Object(keywords)) = (value, schema) else {
            return Ok(());
        };
        if depth > 2 * DEPTH_MAX {
            return Ok(());
        }
        let properties = schema.get("properties");
        let every = schema.get("additionalProperties").is_some();
        for (name, _) in members {
            if every || properties.is_some_and(|all| all.get(name).is_some()) {
                known.insert(name.clone());
            }
        }
        for (name, demand) in keywords {
            match (name.as_str(), demand) {
                ("$ref", to) => {
                    let root = self.root;
                    if let Some(to) = target(root, to.as_text().unwrap_or_default()) {
                        self.evaluated(value, to, depth + 1, known)?;
                    }
                }
                ("allOf" | "anyOf" | "oneOf", Tree::Array(branches)) => {
                    for one in branches {
                        let length = self.path.len();
                        let right = self.satisfies(value, one, depth + 1)?;
                        self.path.truncate(length);
                        if right {
                            self.evaluated(value, one, depth + 1, known)?;
                        }
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Whether `pattern` matches anywhere in `text`.
    pub(crate) fn matches(&mut self, pattern: &str, text: &str) -> Result<bool, FormError> {
        if !self.patterns.contains_key(pattern) {
            self.spend(32 + pattern.len())?;
            let parsed = pattern::parse(pattern).map_err(|reason| {
                FormError::at(&self.path, format!("the pattern {pattern:?} {reason}"))
            })?;
            self.patterns.insert(pattern.to_owned(), parsed);
        }
        let hir = self.patterns[pattern].clone();
        let starts = (0..=text.len())
            .filter(|at| text.is_char_boundary(*at))
            .collect();
        Ok(!self.ends(&hir, text, &starts)?.is_empty())
    }

    /// Where matches of `hir` end that begin at one of `starts`. All positions advance together, so no pattern takes
    /// exponential time.
    fn ends(
        &mut self,
        hir: &Hir,
        text: &str,
        starts: &BTreeSet<usize>,
    ) -> Result<BTreeSet<usize>, FormError> {
        self.spend(1 + starts.len() / 16)?;
        if starts.is_empty() {
            return Ok(BTreeSet::new());
        }
        let after = |at: usize| text[at..].chars().next().map_or(1, char::len_utf8);
        Ok(match hir.kind() {
            HirKind::Empty => starts.clone(),
            HirKind::Literal(literal) => {
                let bytes = text.as_bytes();
                let fits = starts
                    .iter()
                    .filter(|at| bytes[**at..].starts_with(&literal.0));
                fits.map(|at| at + literal.0.len()).collect()
            }
            HirKind::Class(class) => {
                let fits =
                    starts.iter().filter(|at| match class {
                        Class::Unicode(class) => text[**at..].chars().next().is_some_and(|c| {
                            class.iter().any(|r| (r.start()..=r.end()).contains(&c))
                        }),
                        Class::Bytes(class) => text.as_bytes().get(**at).is_some_and(|b| {
                            class.iter().any(|r| (r.start()..=r.end()).contains(b))
                        }),
                    });
                fits.map(|at| at + after(*at)).collect()
            }
            HirKind::Look(Look::Start) => starts.iter().copied().filter(|at| *at == 0).collect(),
            HirKind::Look(Look::End) => {
                let end = text.len();
                starts.iter().copied().filter(|at| *at == end).collect()
            }
            HirKind::Look(_) => BTreeSet::new(),
            HirKind::Capture(capture) => self.ends(&capture.sub, text, starts)?,
            HirKind::Concat(parts) => {
                let mut at = starts.clone();
                for part in parts {
                    at = self.ends(part, text, &at)?;
                }
                at
            }
            HirKind::Alternation(parts) => {
                let mut all = BTreeSet::new();
                for part in parts {
                    all.extend(self.ends(part, text, starts)?);
                }
                all
            }
            HirKind::Repetition(repetition) => {
                let mut last = starts.clone();
                for _ in 0..repetition.min {
                    last = self.ends(&repetition.sub, text, &last)?;
                    if last.is_empty() {
                        break;
                    }
                }
                let mut all = last.clone();
                let mut more = repetition.max.map_or(u32::MAX, |max| max - repetition.min);
                while more > 0 && !last.is_empty() {
                    let next = self.ends(&repetition.sub, text, &last)?;
                    last = next.difference(&all).copied().collect();
                    all.extend(&last);
                    more -= 1;
                }
                all
            }
        })
    }
}
