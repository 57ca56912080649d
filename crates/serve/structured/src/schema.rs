//! JSON by a JSON Schema.
//!
//! Source: JSON Schema, draft 2020-12, "A Vocabulary for Structural Validation". Keywords that constrain a value
//! and that are not modelled are refused by name, wherever in the schema they stand. Other unknown keywords are
//! annotations, as the specification has it.

use std::collections::HashSet;
use std::fmt;

use percent_encoding::percent_decode_str;
use slipstream_base::width::{floor_u64, round_i64, to_i64, to_u8};

use crate::judge::Judge;
use crate::tree::write_text;
use crate::{DEPTH_MAX, OUT_BYTES_MAX, Rng, STEPS_MAX, Tree, pattern, work};

/// Why no text can be made: where in the schema, and what stands there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FormError {
    /// Path within the schema, with points; empty for its root.
    pub at: String,
    /// The error there, as a sentence.
    pub message: String,
}

impl fmt::Display for FormError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// Keywords that constrain values, and that are not modelled.
const REFUSED: [&str; 15] = [
    "not",
    "if",
    "then",
    "else",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "patternProperties",
    "propertyNames",
    "contains",
    "minContains",
    "maxContains",
    "unevaluatedItems",
    "$dynamicRef",
    "$recursiveRef",
];

/// Keywords that say something about a schema, and nothing about a value.
const ANNOTATIONS: [&str; 12] = [
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "$comment",
    "$schema",
    "$id",
    "$defs",
    "definitions",
];

const TYPES: [&str; 7] = [
    "object", "array", "string", "number", "integer", "boolean", "null",
];

/// Deeper than this, what may be left out is.
const DEPTH_WIDE: u32 = 6;

/// Values of schemas that are copied for one text, at most: some hundreds of µs.
pub(crate) const WORK_MAX: u32 = 16 << 10;

/// Bytes of the patterns of a schema, all together, at most.
const PATTERNS_BYTES_MAX: usize = 4 << 10;

/// Values that are made for one text until one satisfies the schema, at most.
const TRIES_MAX: u32 = 4;

/// Formats whose texts are modelled; others are annotations.
const FORMATS: [&str; 17] = [
    "date-time",
    "date",
    "time",
    "duration",
    "email",
    "idn-email",
    "hostname",
    "idn-hostname",
    "ipv4",
    "ipv6",
    "uri",
    "iri",
    "uri-reference",
    "iri-reference",
    "url",
    "uuid",
    "json-pointer",
];

const PATTERN_AND_FORMAT: &str = "`pattern` together with `format` is not modelled; drop one";

/// Words of modelled strings.
const WORDS: [&str; 32] = [
    "amber", "basin", "cedar", "delta", "ember", "field", "grove", "harbor", "island", "jasper",
    "kernel", "lantern", "meadow", "north", "orbit", "pebble", "quartz", "river", "summit",
    "timber", "umbra", "valley", "willow", "yarrow", "zephyr", "anchor", "bridge", "copper",
    "drift", "engine", "forest", "garden",
];

/// Checks that all of `schema` is modelled.
///
/// # Errors
/// [`FormError`] with the first thing that is not.
pub fn check_schema(schema: &Tree) -> Result<(), FormError> {
    let mut check = Check {
        steps: 0,
        pattern_bytes: 0,
        path: Vec::new(),
    };
    check.schema(schema, 0)
}

/// JSON that satisfies `schema`, which [`check_schema`] has passed. Equal generators make equal JSON.
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
    Err(error(
        &path,
        format!("`{name}` in combination with the keywords of other subschemas is not modelled"),
    ))
}

fn joined(path: &[String]) -> String {
    path.join(".")
}

pub(crate) fn error(path: &[String], message: impl Into<String>) -> FormError {
    FormError {
        at: joined(path),
        message: message.into(),
    }
}

struct Check {
    steps: u32,
    pattern_bytes: usize,
    path: Vec<String>,
}

impl Check {
    fn below(&mut self, name: &str, schema: &Tree, depth: u32) -> Result<(), FormError> {
        self.path.push(name.into());
        self.schema(schema, depth + 1)?;
        self.path.pop();
        Ok(())
    }

    fn schema(&mut self, schema: &Tree, depth: u32) -> Result<(), FormError> {
        self.steps += 1;
        if self.steps > STEPS_MAX || depth > DEPTH_MAX {
            return Err(error(
                &self.path,
                format!(
                    "the schema has more than {STEPS_MAX} subschemas, or more than {DEPTH_MAX} levels"
                ),
            ));
        }
        let members = match schema {
            Tree::Object(members) => members,
            Tree::Bool(_) => return Ok(()),
            other => {
                let message = format!(
                    "a schema must be an object or a boolean, not {}",
                    other.type_name()
                );
                return Err(error(&self.path, message));
            }
        };
        for (name, value) in members {
            if REFUSED.contains(&name.as_str()) {
                let message = format!("the keyword `{name}` of JSON Schema is not modelled");
                return Err(error(&self.path, message));
            }
            match name.as_str() {
                "properties" | "$defs" | "definitions" => {
                    let Tree::Object(schemas) = value else {
                        return Err(error(&self.path, format!("`{name}` must be an object")));
                    };
                    self.path.push(name.clone());
                    for (property, schema) in schemas {
                        self.below(property, schema, depth)?;
                    }
                    self.path.pop();
                }
                "items" if matches!(value, Tree::Array(_)) => {
                    return Err(error(
                        &self.path,
                        "an array as `items` is of an older draft; use `prefixItems`",
                    ));
                }
                "items" | "additionalProperties" | "unevaluatedProperties" => {
                    self.below(name, value, depth)?;
                }
                "anyOf" | "oneOf" | "allOf" | "prefixItems" => {
                    let schemas = match value {
                        Tree::Array(schemas) if !schemas.is_empty() => schemas,
                        _ => {
                            let message = format!("`{name}` must be an array that is not empty");
                            return Err(error(&self.path, message));
                        }
                    };
                    self.path.push(name.clone());
                    for (at, schema) in schemas.iter().enumerate() {
                        self.below(&at.to_string(), schema, depth)?;
                    }
                    self.path.pop();
                }
                "$ref"
                    if !value
                        .as_text()
                        .is_some_and(|to| to == "#" || to.starts_with("#/")) =>
                {
                    return Err(error(
                        &self.path,
                        "`$ref` must point into the schema itself, as `#/$defs/name`",
                    ));
                }
                "type" => self.types(value)?,
                "pattern" => {
                    let Some(text) = value.as_text() else {
                        return Err(self.malformed(name, "a string", value));
                    };
                    let format = schema.get("format").and_then(Tree::as_text);
                    if format.is_some_and(|format| FORMATS.contains(&format)) {
                        return Err(error(&self.path, PATTERN_AND_FORMAT));
                    }
                    self.steps += 32; // it takes as long as so many subschemas
                    self.pattern_bytes += text.len();
                    if self.pattern_bytes > PATTERNS_BYTES_MAX {
                        let message = format!(
                            "the patterns of the schema have more than {PATTERNS_BYTES_MAX} bytes"
                        );
                        return Err(error(&self.path, message));
                    }
                    pattern::matching(text, &mut Rng::new(0)).map_err(|reason| {
                        error(&self.path, format!("the pattern {text:?} {reason}"))
                    })?;
                }
                "required" if !matches!(value, Tree::Array(names) if names.iter().all(|n| n.as_text().is_some())) =>
                {
                    return Err(self.malformed(name, "an array of strings", value));
                }
                "enum" if !matches!(value, Tree::Array(_)) => {
                    return Err(self.malformed(name, "an array", value));
                }
                "uniqueItems" if !matches!(value, Tree::Bool(_)) => {
                    return Err(self.malformed(name, "a boolean", value));
                }
                "format" if value.as_text().is_none() => {
                    return Err(self.malformed(name, "a string", value));
                }
                "minLength" | "maxLength" | "minItems" | "maxItems" | "minProperties"
                | "maxProperties"
                    if !matches!(value, Tree::Number(n) if number(n) >= 0.0 && number(n).fract() == 0.0) =>
                {
                    return Err(self.malformed(name, "a whole number from 0", value));
                }
                "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum"
                    if !matches!(value, Tree::Number(_)) =>
                {
                    return Err(self.malformed(name, "a number", value));
                }
                "multipleOf" if !matches!(value, Tree::Number(n) if number(n) > 0.0) => {
                    return Err(self.malformed(name, "a number above 0", value));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// The error for keyword `name` with a value of the wrong type.
    fn malformed(&self, name: &str, expected: &str, value: &Tree) -> FormError {
        let mut found = String::new();
        match value {
            Tree::Bool(_) | Tree::Number(_) | Tree::Null => value.write(&mut found),
            other => found.push_str(other.type_name()),
        }
        error(
            &self.path,
            format!("`{name}` must be {expected}, not {found}"),
        )
    }

    fn types(&self, value: &Tree) -> Result<(), FormError> {
        let known = |one: &Tree| one.as_text().is_some_and(|name| TYPES.contains(&name));
        let right = match value {
            Tree::Array(some) => !some.is_empty() && some.iter().all(known),
            one => known(one),
        };
        if right {
            return Ok(());
        }
        let message = format!(
            "`type` must be one of {}, or some of them",
            TYPES.join(", ")
        );
        Err(error(&self.path, message))
    }
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
        error(&self.path, message)
    }

    fn word(&mut self) -> &'static str {
        WORDS[self.rng.index(WORDS.len())]
    }

    /// Counts the values of schemas that are copied when two are joined.
    fn charge(&mut self, schemas: [&Tree; 2]) -> Result<(), FormError> {
        self.spend(schemas.into_iter().map(weight).sum())
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
            "number" => self.number(schema),
            "integer" => self.integer(schema),
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
                .charge([&rest, &branches[at]])
                .and_then(|()| self.merged(&rest, &branches[at]))
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
            self.charge([&rest, &target])?;
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
                self.charge([&whole, &one])?;
                whole = self.merged(&whole, &one)?;
            }
        }
        Ok(whole)
    }

    /// Target of `$ref`: a JSON pointer (RFC 6901) as a fragment.
    fn target(&self, to: &str) -> Result<&Tree, FormError> {
        target(self.root, to).ok_or_else(|| self.error(format!("`$ref` {to:?} points to nothing")))
    }

    /// A schema that demands what both do.
    fn merged(&mut self, one: &Tree, other: &Tree) -> Result<Tree, FormError> {
        let (members, more) = match (one, other) {
            (Tree::Bool(true), rest) | (rest, Tree::Bool(true)) => return Ok(rest.clone()),
            (Tree::Object(one), Tree::Object(other)) => (one, other),
            _ => return Ok(Tree::Bool(false)),
        };
        let mut whole = members.clone();
        let has = |name| one.get(name).is_some() || other.get(name).is_some();
        // These depend on the keywords next to them in their own subschema.
        let objects = has("additionalProperties");
        let arrays = has("prefixItems") || has("items");
        // The schemas of other members are copied to each member that only the other subschema names.
        for (named, rest, there) in [
            ("properties", "additionalProperties", objects),
            ("prefixItems", "items", arrays),
        ] {
            let of = |name| [one.get(name), other.get(name)].into_iter().flatten();
            let names: usize = of(named).map(members_of).sum();
            let copied: u32 = of(rest).map(weight).sum();
            if there {
                self.spend(copied.saturating_mul(work(names / 4)))?;
            }
        }
        if objects {
            whole.retain(|(n, _)| n != "properties" && n != "additionalProperties");
            whole.extend(joined_properties(one, other));
        }
        if arrays {
            whole.retain(|(n, _)| n != "prefixItems" && n != "items");
            whole.extend(joined_items(one, other));
        }
        for (name, value) in more {
            match name.as_str() {
                "properties" | "additionalProperties" if objects => continue,
                "prefixItems" | "items" if arrays => continue,
                _ => {}
            }
            let Some(known) = whole.iter_mut().find(|(n, _)| n == name) else {
                whole.push((name.clone(), value.clone()));
                continue;
            };
            if known.1 == *value || ANNOTATIONS.contains(&name.as_str()) {
                continue;
            }
            known.1 = self.both(name, &known.1, value)?;
        }
        Ok(Tree::Object(whole))
    }

    /// The value of keyword `name` that demands what both values do.
    fn both(&self, name: &str, one: &Tree, other: &Tree) -> Result<Tree, FormError> {
        let clash = || {
            self.error(format!(
                "`{name}` is demanded twice, and the two cannot be joined"
            ))
        };
        match (name, one, other) {
            ("properties", Tree::Object(one), Tree::Object(other)) => {
                let mut whole = one.clone();
                for (property, schema) in other {
                    match whole.iter_mut().find(|(n, _)| n == property) {
                        None => whole.push((property.clone(), schema.clone())),
                        Some(known) => known.1 = all_of(&known.1, schema),
                    }
                }
                Ok(Tree::Object(whole))
            }
            ("required", Tree::Array(one), Tree::Array(other)) => {
                let mut whole = one.clone();
                whole.extend(other.iter().filter(|name| !one.contains(name)).cloned());
                Ok(Tree::Array(whole))
            }
            ("allOf", Tree::Array(one), Tree::Array(other)) => {
                Ok(Tree::Array(one.iter().chain(other).cloned().collect()))
            }
            ("enum", Tree::Array(one), Tree::Array(other)) => {
                let both = one.iter().filter(|value| other.contains(value));
                Ok(Tree::Array(both.cloned().collect()))
            }
            (
                "minimum" | "exclusiveMinimum" | "minLength" | "minItems" | "minProperties",
                Tree::Number(one),
                Tree::Number(other),
            ) => Ok(Tree::Number(
                if number(one) >= number(other) {
                    one
                } else {
                    other
                }
                .clone(),
            )),
            (
                "maximum" | "exclusiveMaximum" | "maxLength" | "maxItems" | "maxProperties",
                Tree::Number(one),
                Tree::Number(other),
            ) => Ok(Tree::Number(
                if number(one) <= number(other) {
                    one
                } else {
                    other
                }
                .clone(),
            )),
            ("type", _, _) => {
                let list = |tree: &Tree| match tree {
                    Tree::Array(some) => some.clone(),
                    one => vec![one.clone()],
                };
                let (one, other) = (list(one), list(other));
                let integer = Tree::Text("integer".into());
                let number = Tree::Text("number".into());
                let mut both: Vec<Tree> =
                    one.iter().filter(|t| other.contains(t)).cloned().collect();
                let is_whole = |a: &[Tree], b: &[Tree]| a.contains(&integer) && b.contains(&number);
                if (is_whole(&one, &other) || is_whole(&other, &one)) && !both.contains(&integer) {
                    both.push(integer.clone());
                }
                if both.is_empty() {
                    return Err(clash());
                }
                Ok(Tree::Array(both))
            }
            ("uniqueItems", Tree::Bool(one), Tree::Bool(other)) => Ok(Tree::Bool(*one || *other)),
            _ => Err(clash()),
        }
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
        let none = Vec::new();
        let properties = match schema.get("properties") {
            Some(Tree::Object(properties)) => properties,
            _ => &none,
        };
        let required: Vec<&str> = match schema.get("required") {
            Some(Tree::Array(names)) => names.iter().filter_map(Tree::as_text).collect(),
            _ => Vec::new(),
        };
        let least = self.count(schema, "minProperties")?.unwrap_or(0);
        let most = self.count(schema, "maxProperties")?.unwrap_or(usize::MAX);
        let any = Tree::Bool(true);
        let additional = schema.get("additionalProperties").unwrap_or(&any);
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
        let mut number = 0;
        while members.len() < wanted {
            if *additional == Tree::Bool(false) || number > STEPS_MAX {
                return Err(self.error("`minProperties` demands more properties than are allowed"));
            }
            number += 1;
            let name = format!("{}{number}", self.word());
            let known = properties.iter().any(|(property, _)| *property == name);
            if !known {
                members.push((name, additional));
            }
        }
        if members.len() > most {
            return Err(self.error("`maxProperties` allows fewer properties than are required"));
        }
        self.out.push('{');
        for (at, (name, value)) in members.iter().enumerate() {
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

    fn array(&mut self, schema: &Tree, depth: u32) -> Result<(), FormError> {
        let none = Vec::new();
        let first = match schema.get("prefixItems") {
            Some(Tree::Array(first)) => first,
            _ => &none,
        };
        let any = Tree::Bool(true);
        let items = schema.get("items").unwrap_or(&any);
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
        let vary = self.vary;
        self.out.push('[');
        for at in 0..count {
            if at > 0 {
                self.out.push_str(", ");
            }
            let item = first.get(at).unwrap_or(items);
            self.path.push(at.to_string());
            let start = self.out.len();
            let mut tries = 0;
            loop {
                self.vary = vary || tries > 0;
                let made = self.value(item, depth + 1);
                self.vary = vary;
                made?;
                if !unique {
                    break;
                }
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
                    break;
                }
                tries += 1;
                self.spend(24)?;
                if tries < 64 {
                    self.out.truncate(start);
                    continue;
                }
                if at >= least {
                    // Fewer are enough.
                    self.out.truncate(start.saturating_sub(2));
                    self.out.push(']');
                    self.path.pop();
                    return Ok(());
                }
                return Err(self.error("not enough different items were found for `uniqueItems`"));
            }
            self.path.pop();
        }
        self.out.push(']');
        Ok(())
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
            .and_then(|format| self.by_format(format))
        {
            if text.len() < least || text.len() > most {
                return Err(self.error("`format` does not fit `minLength` and `maxLength`"));
            }
            text
        } else if self.vary {
            let count = least.max(12).min(most);
            (0..count)
                .map(|_| char::from(b'a' + to_u8(self.rng.below(26))))
                .collect()
        } else {
            let words = 1 + self.rng.below(4);
            let mut text = String::new();
            let mut count = 0;
            while count < words || text.len() < least {
                if count > 0 {
                    text.push(' ');
                }
                text.push_str(self.word());
                count += 1;
            }
            text.truncate(most); // all of it is ASCII
            text
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

    /// A text in a format that the specification defines; other formats are annotations.
    fn by_format(&mut self, format: &str) -> Option<String> {
        let mut two = |from: u64, count: u64| format!("{:02}", from + self.rng.below(count));
        let date = format!("20{}-{}-{}", two(10, 20), two(1, 12), two(1, 28));
        let time = format!("{}:{}:{}Z", two(0, 24), two(0, 60), two(0, 60));
        Some(match format {
            "date-time" => format!("{date}T{time}"),
            "date" => date,
            "time" => time,
            "duration" => format!("P{}D", 1 + self.rng.below(30)),
            "email" | "idn-email" => format!("{}@example.com", self.word()),
            "hostname" | "idn-hostname" => format!("{}.example.com", self.word()),
            "ipv4" => format!("192.0.2.{}", 1 + self.rng.below(254)),
            "ipv6" => format!("2001:db8::{:x}", 1 + self.rng.below(0xfffe)),
            "uri" | "iri" | "uri-reference" | "iri-reference" | "url" => {
                format!("https://example.com/{}", self.word())
            }
            "uuid" => {
                let (high, low) = (self.rng.below(u64::MAX), self.rng.below(u64::MAX));
                format!(
                    "{:08x}-{:04x}-4{:03x}-a{:03x}-{:012x}",
                    high >> 32,
                    high & 0xffff,
                    low & 0xfff,
                    low >> 12 & 0xfff,
                    low >> 16
                )
            }
            "json-pointer" => format!("/{}", self.word()),
            _ => return None,
        })
    }

    fn count(&self, schema: &Tree, name: &str) -> Result<Option<usize>, FormError> {
        match schema.get(name) {
            None => Ok(None),
            Some(Tree::Number(n)) => match number(n) {
                n if n >= 0.0 && n.fract() == 0.0 => {
                    Ok(Some(usize::try_from(floor_u64(n)).unwrap_or(usize::MAX)))
                }
                _ => Err(self.error(format!("`{name}` must be a whole number from 0"))),
            },
            Some(_) => Err(self.error(format!("`{name}` must be a number"))),
        }
    }

    fn bound(&self, schema: &Tree, name: &str) -> Result<Option<f64>, FormError> {
        match schema.get(name) {
            None => Ok(None),
            Some(Tree::Number(n)) => Ok(Some(number(n))),
            Some(_) => Err(self.error(format!("`{name}` must be a number"))),
        }
    }

    fn integer(&mut self, schema: &Tree) -> Result<(), FormError> {
        /// Whole numbers up to this are exact as `f64`, and as numbers of JavaScript.
        const EXACT: f64 = 9_007_199_254_740_991.0;
        let low = [
            self.bound(schema, "minimum")?.map(f64::ceil),
            self.bound(schema, "exclusiveMinimum")?
                .map(|b| b.floor() + 1.0),
        ];
        let high = [
            self.bound(schema, "maximum")?.map(f64::floor),
            self.bound(schema, "exclusiveMaximum")?
                .map(|b| b.ceil() - 1.0),
        ];
        let low = low.into_iter().flatten().reduce(f64::max);
        let high = high.into_iter().flatten().reduce(f64::min);
        let step = self.bound(schema, "multipleOf")?.unwrap_or(1.0);
        if step <= 0.0 || step.fract() != 0.0 {
            return Err(self.error("`multipleOf` of an integer must be a whole number above 0"));
        }
        let span = 100.0 * step;
        let (low, high) = match (low, high) {
            (Some(low), Some(high)) => (low, high),
            (Some(low), None) => (low, low + span),
            (None, Some(high)) => ((high - span).max(0.0).min(high), high),
            (None, None) => (0.0, span),
        };
        let (low, high) = ((low / step).ceil(), (high / step).floor());
        if low > high || low.abs() * step > EXACT || high.abs() * step > EXACT {
            return Err(self.error("no integer of up to 53 bits is within the bounds"));
        }
        let drawn = round_i64(low) + to_i64(self.rng.below(floor_u64(high - low) + 1));
        self.out.push_str(&(drawn * round_i64(step)).to_string());
        Ok(())
    }

    fn number(&mut self, schema: &Tree) -> Result<(), FormError> {
        if let Some(step) = self.bound(schema, "multipleOf")? {
            if step.fract() == 0.0 {
                return self.integer(schema);
            }
            return Err(self.error("`multipleOf` with a fraction is not modelled"));
        }
        let (floor, above) = (
            self.bound(schema, "minimum")?,
            self.bound(schema, "exclusiveMinimum")?,
        );
        let (ceiling, under) = (
            self.bound(schema, "maximum")?,
            self.bound(schema, "exclusiveMaximum")?,
        );
        let low = [floor, above].into_iter().flatten().reduce(f64::max);
        let high = [ceiling, under].into_iter().flatten().reduce(f64::min);
        let (low, high) = match (low, high) {
            (Some(low), Some(high)) => (low, high),
            (Some(low), None) => (low, low + 100.0),
            (None, Some(high)) => ((high - 100.0).max(0.0).min(high), high),
            (None, None) => (0.0, 100.0),
        };
        let holds = |value: f64| {
            floor.is_none_or(|b| value >= b)
                && above.is_none_or(|b| value > b)
                && ceiling.is_none_or(|b| value <= b)
                && under.is_none_or(|b| value < b)
        };
        let drawn = low + self.rng.unit() * (high - low);
        let short = (drawn * 100.0).round() / 100.0;
        let value = [short, drawn, low + (high - low) / 2.0, low, high]
            .into_iter()
            .find(|value| value.is_finite() && holds(*value))
            .ok_or_else(|| self.error("no number is within the bounds"))?;
        let mut text = format!("{value:?}");
        if !text.contains(['.', 'e']) {
            text.push_str(".0");
        }
        self.out.push_str(&text);
        Ok(())
    }
}

/// Members or elements of `value`.
fn members_of(value: &Tree) -> usize {
    match value {
        Tree::Array(elements) => elements.len(),
        Tree::Object(members) => members.len(),
        _ => 0,
    }
}

/// Values in `schema`.
pub(crate) fn weight(schema: &Tree) -> u32 {
    1 + match schema {
        Tree::Array(elements) => elements.iter().map(weight).sum(),
        Tree::Object(members) => members.iter().map(|(_, value)| weight(value)).sum(),
        _ => 0,
    }
}

pub(crate) fn number(number: &serde_json::Number) -> f64 {
    number.as_f64().unwrap_or(f64::NAN)
}

/// The types that a schema allows; empty: any.
pub(crate) fn types_of(schema: &Tree) -> Vec<&'static str> {
    let known = |one: &Tree| {
        let name = one.as_text()?;
        TYPES.into_iter().find(|t| *t == name)
    };
    match schema.get("type") {
        Some(Tree::Array(some)) => some.iter().filter_map(known).collect(),
        Some(one) => known(one).into_iter().collect(),
        None => Vec::new(),
    }
}

pub(crate) fn is_of(value: &Tree, name: &str) -> bool {
    match (value, name) {
        (Tree::Number(n), "integer") => number(n).fract() == 0.0,
        (value, name) => value.type_name() == name,
    }
}

fn without(schema: &Tree, name: &str) -> Tree {
    match schema {
        Tree::Object(members) => {
            let rest = members.iter().filter(|(n, _)| n != name);
            Tree::Object(rest.cloned().collect())
        }
        other => other.clone(),
    }
}

/// The part of `root` that the JSON pointer in the fragment `to` points to.
pub(crate) fn target<'a>(root: &'a Tree, to: &str) -> Option<&'a Tree> {
    let pointer = to.strip_prefix('#').unwrap_or(to);
    let mut at = root;
    for part in pointer.split('/').skip(1) {
        let part = percent_decode_str(part).decode_utf8_lossy();
        let part = part.replace("~1", "/").replace("~0", "~");
        at = match at {
            Tree::Array(elements) => part.parse().ok().and_then(|i: usize| elements.get(i)),
            other => other.get(&part),
        }?;
    }
    Some(at)
}

/// A schema that both hold for.
fn all_of(one: &Tree, other: &Tree) -> Tree {
    match (one, other) {
        (Tree::Bool(true), rest) | (rest, Tree::Bool(true)) => rest.clone(),
        (Tree::Bool(false), _) | (_, Tree::Bool(false)) => Tree::Bool(false),
        (one, other) if one == other => one.clone(),
        (one, other) => {
            let both = vec![one.clone(), other.clone()];
            Tree::Object(vec![("allOf".into(), Tree::Array(both))])
        }
    }
}

/// `properties` and `additionalProperties` that demand what those of both schemas do.
fn joined_properties(one: &Tree, other: &Tree) -> [(String, Tree); 2] {
    let any = Tree::Bool(true);
    let of = |schema: &Tree, name: &str| {
        let own = schema.get("properties").and_then(|all| all.get(name));
        own.or(schema.get("additionalProperties"))
            .unwrap_or(&any)
            .clone()
    };
    let mut properties: Vec<(String, Tree)> = Vec::new();
    let mut known = HashSet::new();
    for schema in [one, other] {
        if let Some(Tree::Object(members)) = schema.get("properties") {
            for (name, _) in members {
                if known.insert(name) {
                    properties.push((name.clone(), all_of(&of(one, name), &of(other, name))));
                }
            }
        }
    }
    let rest = |schema: &Tree| schema.get("additionalProperties").unwrap_or(&any).clone();
    [
        ("properties".into(), Tree::Object(properties)),
        (
            "additionalProperties".into(),
            all_of(&rest(one), &rest(other)),
        ),
    ]
}

/// `prefixItems` and `items` that demand what those of both schemas do.
fn joined_items(one: &Tree, other: &Tree) -> Vec<(String, Tree)> {
    let any = Tree::Bool(true);
    let first = |schema: &Tree| match schema.get("prefixItems") {
        Some(Tree::Array(first)) => first.clone(),
        _ => Vec::new(),
    };
    let rest = |schema: &Tree| schema.get("items").unwrap_or(&any).clone();
    let (left, right) = (first(one), first(other));
    let (left_rest, right_rest) = (rest(one), rest(other));
    let both: Vec<Tree> = (0..left.len().max(right.len()))
        .map(|at| {
            all_of(
                left.get(at).unwrap_or(&left_rest),
                right.get(at).unwrap_or(&right_rest),
            )
        })
        .collect();
    let mut made = vec![("items".into(), all_of(&left_rest, &right_rest))];
    if !both.is_empty() {
        made.push(("prefixItems".into(), Tree::Array(both)));
    }
    made
}

/// A text that two values share exactly if they are equal in JSON Schema: `1` is `1.0`, and members have no order.
pub(crate) fn canonical(value: &Tree) -> String {
    fn sorted(value: &Tree) -> Tree {
        match value {
            Tree::Number(n) => Tree::Number(whole(n)),
            Tree::Array(elements) => Tree::Array(elements.iter().map(sorted).collect()),
            Tree::Object(members) => {
                let members = members.iter().map(|(n, v)| (n.clone(), sorted(v)));
                let mut members: Vec<_> = members.collect();
                members.sort_by(|a, b| a.0.cmp(&b.0));
                Tree::Object(members)
            }
            other => other.clone(),
        }
    }
    let mut out = String::new();
    sorted(value).write(&mut out);
    out
}

/// `n` without a fraction that is 0.
fn whole(n: &serde_json::Number) -> serde_json::Number {
    let value = number(n);
    if n.as_i64().is_none() && n.as_u64().is_none() && value.fract() == 0.0 && value.abs() < 9e18 {
        return round_i64(value).into();
    }
    n.clone()
}

/// Whether two values are equal in JSON Schema.
pub(crate) fn same(one: &Tree, other: &Tree) -> bool {
    match (one, other) {
        (Tree::Number(one), Tree::Number(other)) => whole(one) == whole(other),
        (Tree::Array(one), Tree::Array(other)) => {
            one.len() == other.len() && one.iter().zip(other).all(|(a, b)| same(a, b))
        }
        (Tree::Object(members), Tree::Object(others)) => {
            members.len() == others.len()
                && members
                    .iter()
                    .all(|(name, value)| other.get(name).is_some_and(|known| same(value, known)))
        }
        (one, other) => one == other,
    }
}
