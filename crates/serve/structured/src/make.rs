//! JSON that satisfies a schema, drawn from a seed.

use std::collections::HashSet;

use crate::check::PATTERN_AND_FORMAT;
use crate::equality::canonical;
use crate::judge::Judge;
use crate::keywords::{FORMATS, count, target, types_of, without};
use crate::merge::{merge_work, merged};
use crate::scalars::{by_format, letters, word, words};
use crate::tree::write_text;
use crate::{
    DEPTH_MAX, FormError, OUT_BYTES_MAX, Rng, STEPS_MAX, Tree, WORK_MAX, pattern, scalars, work,
};

/// Optional values are omitted below this depth.
const DEPTH_WIDE: u32 = 6;

/// Values that are made for one text until one satisfies the schema, at most.
const TRIES_MAX: u32 = 4;

/// The schema of a value that nothing is said about.
static ANY: Tree = Tree::Bool(true);

/// JSON that satisfies `schema`, which [`check_schema`](crate::check_schema) has passed. Equal generators make equal JSON.
///
/// # Errors
/// [`FormError`] if no value can satisfy it, or none of a bounded size was found.
pub fn json_by_schema(schema: &Tree, rng: &mut Rng) -> Result<String, FormError> {
    let mut maker = Maker {
        root: schema,
        rng,
        steps: 0,
        work: 0,
        vary: false,
        out: String::new(),
        path: Vec::new(),
    };
    let mut judge = Judge::new(schema);
    for _ in 0..TRIES_MAX {
        maker.out.clear();
        judge.path.clear();
        maker.value(schema, 0)?;
        // Keywords of several subschemas are joined before a value is made; the value itself is the proof.
        let value = serde_json::from_str::<serde_json::Value>(&maker.out)
            .map(Tree::from)
            .map_err(|error| maker.error(format!("the value that was made is no JSON: {error}")))?;
        let before = judge.work;
        let right = judge.satisfies(&value, schema, 0)?;
        maker.rng.spend(judge.work - before);
        if right {
            return Ok(maker.out);
        }
    }
    let (path, name) = judge.missed.unwrap_or_default();
    Err(FormError::at(
        &path,
        format!("`{name}` in combination with the keywords of other subschemas is not modelled"),
    ))
}

struct Maker<'a> {
    root: &'a Tree,
    rng: &'a mut Rng,
    steps: u32,
    /// Values of schemas that were copied.
    work: u32,
    /// Whether strings are drawn letter by letter: words did not differ enough for `uniqueItems`.
    vary: bool,
    out: String,
    path: Vec<String>,
}

impl Maker<'_> {
    fn error(&self, message: impl Into<String>) -> FormError {
        FormError::at(&self.path, message)
    }

    /// A schema that demands what both do.
    fn merged(&mut self, one: &Tree, other: &Tree) -> Result<Tree, FormError> {
        self.spend(merge_work(one, other))?;
        merged(one, other).map_err(|reason| self.error(reason))
    }

    /// The value of keyword `name`, a whole number.
    fn count(&self, schema: &Tree, name: &str) -> Result<Option<usize>, FormError> {
        count(schema, name).map_err(|reason| self.error(reason))
    }

    /// Counts work that is about that of copying so many values.
    fn spend(&mut self, work: u32) -> Result<(), FormError> {
        self.work = self.work.saturating_add(work);
        self.rng.spend(work);
        if self.work > WORK_MAX {
            return Err(self
                .error("`$ref`, `allOf`, `anyOf` or `oneOf` join too many or too large schemas, patterns are \
                 matched too often, or `uniqueItems` finds too many equal items"));
        }
        Ok(())
    }

    fn step(&mut self, depth: u32) -> Result<(), FormError> {
        self.steps += 1;
        self.rng.spend(1);
        if self.steps > STEPS_MAX || depth > DEPTH_MAX || self.out.len() > OUT_BYTES_MAX {
            return Err(self.error(format!(
                "the JSON that the schema demands has more than {STEPS_MAX} values, {DEPTH_MAX} levels or \
                 {OUT_BYTES_MAX} bytes"
            )));
        }
        Ok(())
    }

    fn value(&mut self, schema: &Tree, depth: u32) -> Result<(), FormError> {
        self.step(depth)?;
        match schema {
            Tree::Bool(false) => {
                return Err(self.error("the schema is `false`, which nothing satisfies"));
            }
            Tree::Object(_) => {}
            _ => return self.string(schema),
        }
        if schema.get("$ref").is_some() || schema.get("allOf").is_some() {
            let whole = self.resolved(schema, depth)?;
            return self.value(&whole, depth + 1);
        }
        if let Some(value) = schema.get("const") {
            return self.listed("const", std::slice::from_ref(value), schema);
        }
        if let Some(Tree::Array(values)) = schema.get("enum") {
            return self.listed("enum", values, schema);
        }
        for name in ["anyOf", "oneOf"] {
            if let Some(Tree::Array(branches)) = schema.get(name) {
                return self.branch(schema, name, branches, depth);
            }
        }
        match self.choose_type(schema, depth) {
            "object" => self.object(schema, depth),
            "array" => self.array(schema, depth),
            "number" => self.scalar(scalars::number, schema),
            "integer" => self.scalar(scalars::integer, schema),
            "boolean" => {
                let value = self.rng.below(2) == 1;
                self.out.push_str(if value { "true" } else { "false" });
                Ok(())
            }
            "null" => {
                self.out.push_str("null");
                Ok(())
            }
            _ => self.string(schema),
        }
    }

    fn scalar(
        &mut self,
        make: fn(&Tree, &mut Rng) -> Result<String, String>,
        schema: &Tree,
    ) -> Result<(), FormError> {
        let text = make(schema, self.rng).map_err(|reason| self.error(reason))?;
        self.out.push_str(&text);
        Ok(())
    }

    /// One of `values`, of keyword `name`, that satisfies the keywords of `schema` next to it.
    fn listed(&mut self, name: &str, values: &[Tree], schema: &Tree) -> Result<(), FormError> {
        let mut judge = Judge::new(self.root);
        judge.given = Some(name);
        judge.path.clone_from(&self.path);
        let start = match values.len() {
            0 => 0,
            count => self.rng.index(count),
        };
        for at in 0..values.len() {
            let value = &values[(start + at) % values.len()];
            let before = judge.work;
            judge.path.truncate(self.path.len());
            let right = judge.satisfies(value, schema, 0)?;
            self.spend(judge.work - before)?;
            if right {
                value.write(&mut self.out);
                return Ok(());
            }
        }
        Err(self.error(format!(
            "no value of `{name}` satisfies the keywords next to it"
        )))
    }

    /// One of `branches`, together with the keywords next to them. Far down, one that ends soon.
    fn branch(
        &mut self,
        schema: &Tree,
        name: &str,
        branches: &[Tree],
        depth: u32,
    ) -> Result<(), FormError> {
        let rest = without(schema, name);
        let start = self.rng.index(branches.len());
        let mut order: Vec<usize> = (0..branches.len())
            .map(|at| (start + at) % branches.len())
            .collect();
        if depth > DEPTH_WIDE {
            // Stable: those that end here keep their drawn order.
            order.sort_by_key(|&at| {
                let nested = ["$ref", "allOf", "anyOf", "oneOf", "properties", "items"];
                nested.iter().any(|k| branches[at].get(k).is_some())
            });
        }
        let mut first = None;
        for at in order {
            let (len, steps_path) = (self.out.len(), self.path.len());
            self.path.push(format!("{name}.{at}"));
            let tried = self
                .merged(&rest, &branches[at])
                .and_then(|whole| self.value(&whole, depth + 1));
            match tried {
                Ok(()) => {
                    self.path.truncate(steps_path);
                    return Ok(());
                }
                Err(error) => {
                    self.out.truncate(len);
                    self.path.truncate(steps_path);
                    first.get_or_insert(error);
                }
            }
        }
        Err(first.unwrap_or_else(|| self.error(format!("`{name}` is empty"))))
    }

    /// The schema without `$ref` and `allOf`: what they name is merged into it.
    fn resolved(&mut self, schema: &Tree, depth: u32) -> Result<Tree, FormError> {
        self.step(depth)?;
        if let Some(to) = schema.get("$ref") {
            let target = self.target(to.as_text().unwrap_or_default())?.clone();
            let rest = without(schema, "$ref");
            return self.merged(&rest, &target);
        }
        let mut whole = without(schema, "allOf");
        if let Some(Tree::Array(all)) = schema.get("allOf") {
            for one in all {
                // A reference is followed first: its target may have the same keywords as the others.
                let mut one = one.clone();
                while one.get("$ref").is_some() || one.get("allOf").is_some() {
                    one = self.resolved(&one, depth + 1)?;
                }
                whole = self.merged(&whole, &one)?;
            }
        }
        Ok(whole)
    }

    /// Target of `$ref`: a JSON pointer (RFC 6901) as a fragment.
    fn target(&self, to: &str) -> Result<&Tree, FormError> {
        target(self.root, to).ok_or_else(|| self.error(format!("`$ref` {to:?} points to nothing")))
    }

    /// The type of the value that is made: one that is allowed, rarely null.
    fn choose_type(&mut self, schema: &Tree, depth: u32) -> &'static str {
        let types = types_of(schema);
        if types.is_empty() {
            let has = |names: &[&str]| names.iter().any(|name| schema.get(name).is_some());
            return if has(&[
                "properties",
                "required",
                "additionalProperties",
                "minProperties",
            ]) {
                "object"
            } else if has(&[
                "items",
                "prefixItems",
                "minItems",
                "maxItems",
                "uniqueItems",
            ]) {
                "array"
            } else if has(&["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
                || has(&["multipleOf"])
            {
                "number"
            } else {
                "string"
            };
        }
        let null = types.contains(&"null");
        if null && (depth > DEPTH_WIDE || types.len() == 1 || self.rng.below(4) == 0) {
            return "null";
        }
        let types: Vec<_> = types.into_iter().filter(|t| *t != "null").collect();
        types[self.rng.index(types.len())]
    }

    fn object(&mut self, schema: &Tree, depth: u32) -> Result<(), FormError> {
        self.out.push('{');
        for (at, (name, value)) in self.members(schema, depth)?.iter().enumerate() {
            if at > 0 {
                self.out.push_str(", ");
            }
            write_text(name, &mut self.out);
            self.out.push_str(": ");
            self.path.push(name.clone());
            self.value(value, depth + 1)?;
            self.path.pop();
        }
        self.out.push('}');
        Ok(())
    }

    /// Names of an object's members, with the schema of each.
    fn members<'s>(
        &mut self,
        schema: &'s Tree,
        depth: u32,
    ) -> Result<Vec<(String, &'s Tree)>, FormError> {
        let properties: &[(String, Tree)] = match schema.get("properties") {
            Some(Tree::Object(properties)) => properties,
            _ => &[],
        };
        let required: Vec<&str> = match schema.get("required") {
            Some(Tree::Array(names)) => names.iter().filter_map(Tree::as_text).collect(),
            _ => Vec::new(),
        };
        let least = self.count(schema, "minProperties")?.unwrap_or(0);
        let most = self.count(schema, "maxProperties")?.unwrap_or(usize::MAX);
        let additional = schema.get("additionalProperties").unwrap_or(&ANY);
        let mut members: Vec<(String, &Tree)> = Vec::new();
        let mut optional = most.saturating_sub(required.len());
        for (name, value) in properties {
            let needed = required.contains(&name.as_str());
            let room = optional > 0 && *value != Tree::Bool(false);
            let wanted = least >= properties.len() || depth <= DEPTH_WIDE && self.rng.below(2) == 0;
            if needed || room && wanted {
                if !needed {
                    optional -= 1;
                }
                members.push((name.clone(), value));
            }
        }
        for name in &required {
            if !members.iter().any(|(known, _)| known == name) {
                members.push(((*name).to_owned(), additional));
            }
        }
        // A map: an object that names no property, and says what its values are.
        let is_map = properties.is_empty() && matches!(additional, Tree::Object(_));
        let wanted = least
            .max(usize::from(is_map && depth <= DEPTH_WIDE))
            .min(most);
        for (name, value) in properties {
            if members.len() < wanted && !members.iter().any(|(known, _)| known == name) {
                members.push((name.clone(), value));
            }
        }
        self.add_members(&mut members, wanted, properties, additional)?;
        if members.len() > most {
            return Err(self.error("`maxProperties` allows fewer properties than are required"));
        }
        Ok(members)
    }

    /// Adds members that the schema does not name, until there are `wanted`.
    fn add_members<'s>(
        &mut self,
        members: &mut Vec<(String, &'s Tree)>,
        wanted: usize,
        properties: &[(String, Tree)],
        additional: &'s Tree,
    ) -> Result<(), FormError> {
        let mut number = 0;
        while members.len() < wanted {
            if *additional == Tree::Bool(false) || number > STEPS_MAX {
                return Err(self.error("`minProperties` demands more properties than are allowed"));
            }
            number += 1;
            let name = format!("{}{number}", word(self.rng));
            let known = properties.iter().any(|(property, _)| *property == name);
            if !known {
                members.push((name, additional));
            }
        }
        Ok(())
    }

    fn array(&mut self, schema: &Tree, depth: u32) -> Result<(), FormError> {
        let first: &[Tree] = match schema.get("prefixItems") {
            Some(Tree::Array(first)) => first,
            _ => &[],
        };
        let items = schema.get("items").unwrap_or(&ANY);
        let least = self.count(schema, "minItems")?.unwrap_or(0);
        let most = self.count(schema, "maxItems")?.unwrap_or(usize::MAX);
        let most = match items {
            Tree::Bool(false) => most.min(first.len()),
            _ => most,
        };
        let closed = first.iter().position(|item| *item == Tree::Bool(false));
        let most = closed.map_or(most, |at| most.min(at));
        if least > most {
            return Err(self.error("`minItems` is more than the array may have"));
        }
        let usual = if depth > DEPTH_WIDE {
            least
        } else {
            first.len().max(1 + self.rng.index(3))
        };
        let count = usual.clamp(least, most);
        let unique = schema.get("uniqueItems") == Some(&Tree::Bool(true));
        let mut seen: HashSet<String> = HashSet::new();
        self.out.push('[');
        for at in 0..count {
            let start = self.out.len();
            if at > 0 {
                self.out.push_str(", ");
            }
            let item = first.get(at).unwrap_or(items);
            self.path.push(at.to_string());
            if !unique {
                self.value(item, depth + 1)?;
            } else if !self.unlike(item, depth, &mut seen)? {
                if at < least {
                    let message = "not enough different items were found for `uniqueItems`";
                    return Err(self.error(message));
                }
                // Fewer are enough.
                self.out.truncate(start);
                self.path.pop();
                break;
            }
            self.path.pop();
        }
        self.out.push(']');
        Ok(())
    }

    /// Makes an item that is not in `seen`, and adds it there. False if none was found.
    fn unlike(
        &mut self,
        item: &Tree,
        depth: u32,
        seen: &mut HashSet<String>,
    ) -> Result<bool, FormError> {
        let (start, vary) = (self.out.len(), self.vary);
        for tries in 0..64 {
            self.out.truncate(start);
            self.vary = vary || tries > 0;
            let made = self.value(item, depth + 1);
            self.vary = vary;
            made?;
            let text = &self.out[start..];
            // Other texts are the same exactly if the values are.
            let plain = text.starts_with('"') || !text.contains(['.', 'e', 'E', '[', '{']);
            let key = if plain {
                text.to_owned()
            } else {
                let value: serde_json::Value = serde_json::from_str(text)
                    .map_err(|error| self.error(format!("an item is no JSON: {error}")))?;
                canonical(&Tree::from(value))
            };
            self.spend(work(1 + key.len() / 32))?;
            if seen.insert(key) {
                return Ok(true);
            }
            self.spend(24)?;
        }
        Ok(false)
    }

    fn string(&mut self, schema: &Tree) -> Result<(), FormError> {
        let least = self.count(schema, "minLength")?.unwrap_or(0);
        let most = self.count(schema, "maxLength")?.unwrap_or(usize::MAX);
        if least > most {
            return Err(self.error("`minLength` is more than `maxLength`"));
        }
        if least > OUT_BYTES_MAX {
            return Err(self.error(format!("`minLength` is more than {OUT_BYTES_MAX}")));
        }
        let text = if let Some(pattern) = schema.get("pattern").and_then(Tree::as_text) {
            let format = schema.get("format").and_then(Tree::as_text);
            if format.is_some_and(|format| FORMATS.contains(&format)) {
                return Err(self.error(PATTERN_AND_FORMAT));
            }
            self.by_pattern(pattern, least, most)?
        } else if let Some(text) = schema
            .get("format")
            .and_then(Tree::as_text)
            .and_then(|format| by_format(format, self.rng))
        {
            if text.len() < least || text.len() > most {
                return Err(self.error("`format` does not fit `minLength` and `maxLength`"));
            }
            text
        } else if self.vary {
            letters(least, most, self.rng)
        } else {
            words(least, most, self.rng)
        };
        write_text(&text, &mut self.out);
        Ok(())
    }

    fn by_pattern(&mut self, text: &str, least: usize, most: usize) -> Result<String, FormError> {
        for _ in 0..64 {
            self.step(0)?;
            // It is parsed each time, at some 100 ns per byte.
            self.spend(work(32 + text.len()))?;
            let found = pattern::matching(text, self.rng)
                .map_err(|reason| self.error(format!("the pattern {text:?} {reason}")))?;
            self.spend(work(found.len()))?;
            let count = found.chars().count();
            if (least..=most).contains(&count) {
                return Ok(found);
            }
            if let Some(fitted) = self.fitted(text, &found, least, most)? {
                return Ok(fitted);
            }
        }
        Err(self.error(format!(
            "no match of the pattern {text:?} was found within `minLength` and `maxLength`"
        )))
    }

    /// `found` made as long as it must be, if it matches the pattern `text` then.
    fn fitted(
        &mut self,
        text: &str,
        found: &str,
        least: usize,
        most: usize,
    ) -> Result<Option<String>, FormError> {
        let count = found.chars().count();
        if least > STEPS_MAX as usize {
            return Ok(None);
        }
        let mut candidates: Vec<String> = Vec::new();
        if count > most {
            candidates.push(found.chars().take(most).collect());
        } else {
            let pads = [found.chars().last().unwrap_or('a'), 'a', '0'];
            for pad in pads {
                let padding = std::iter::repeat_n(pad, least - count);
                candidates.push(found.chars().chain(padding).collect());
            }
        }
        let mut judge = Judge::new(self.root);
        for candidate in candidates {
            // A check that takes too long finds nothing; it is no error yet.
            let matched = judge.matches(text, &candidate).unwrap_or(false);
            self.spend(judge.work)?;
            judge.work = 0;
            if matched {
                return Ok(Some(candidate));
            }
        }
        Ok(None)
    }
}
