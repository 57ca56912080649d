//! `name`, `after` and `[[compute]]`: dependencies between flows by the names of their tables.

use std::collections::HashMap;
use std::ops::Range;

use slipstream_base::width::to_u32;
use slipstream_config::doc::{Origin, Scalar, Table, Value};

use super::flows::Reader;
use super::template::ParsedFlow;
use crate::scenario::{After, Finished};

/// A table that others may refer to in `after`.
pub(super) struct Item {
    name: Option<String>,
    /// Position of its table, for errors of the set-up.
    pub(super) origin: Origin,
    after: Vec<String>,
    /// Position of `after`.
    after_at: Origin,
    /// Its flows.
    pub(super) flows: Range<usize>,
    /// Hosts that compute, and the duration, ns.
    compute: Option<(Vec<u32>, u64)>,
}

/// Maximum number of dependencies that `after` may create, 16 bytes each.
const WAITS_MAX: usize = 1 << 24;

impl Reader<'_> {
    /// `[[compute]]`: hosts that are busy for a time between two other items.
    pub(super) fn read_compute(&self, t: &Table<'_>) -> Item {
        let mut item = read_item(t);
        let hosts: Vec<u32> = t
            .get("hosts")
            .required("list the hosts that compute", Vec::new());
        let hosts = hosts
            .iter()
            .filter_map(|&host| self.host(t, "hosts", host))
            .collect();
        let time = t
            .get::<u64>("duration_ns")
            .within(0..=1_000_000_000_000_000_000)
            .required("give its length in ns", 0);
        if item.name.is_none() {
            t.error(
                "name",
                "the computation has no name, so no flow can wait for it",
                "add name = \"compute0\" and refer to it in `after`",
            );
        }
        item.compute = Some((hosts, time));
        item
    }

    /// Resolves names in `after` to dependencies of flows. A flow waits, at its sender, for the
    /// part of an item that its sender participates in.
    pub(super) fn link_items(&self, root: &Table<'_>, items: &[Item], flows: &mut [ParsedFlow]) {
        if items.iter().all(|item| item.after.is_empty()) {
            return;
        }
        let mut by_name = HashMap::new();
        for (i, item) in items.iter().enumerate() {
            if let Some(name) = &item.name
                && by_name.insert(name.as_str(), i).is_some()
            {
                root.error_at(
                    item.origin.clone(),
                    format!("the name `{name}` is given twice"),
                    "give each table its own name",
                );
                return;
            }
        }
        let names = Names {
            items,
            by_name,
            flows: items
                .iter()
                .map(|item| {
                    item.flows
                        .clone()
                        .map(|i| (flows[i].flow.src, flows[i].flow.dst))
                })
                .map(Iterator::collect)
                .collect(),
        };
        let mut total = 0;
        for item in items.iter().filter(|item| !item.after.is_empty()) {
            let mut known: HashMap<u32, Result<Wait, String>> = HashMap::new();
            for i in item.flows.clone() {
                let src = flows[i].flow.src;
                let wait = known.entry(src).or_insert_with(|| {
                    let mut wait = Wait::default();
                    for name in &item.after {
                        names.complete(name, src, 0, 0, &mut wait)?;
                    }
                    Ok(wait)
                });
                let wait = match wait {
                    Ok(wait) => wait,
                    Err(what) => {
                        root.error_at(item.after_at.clone(), what.clone(), "correct `after`");
                        return;
                    }
                };
                total += wait.after.len();
                if total > WAITS_MAX {
                    root.error_at(
                        item.after_at.clone(),
                        format!("`after` creates more than {WAITS_MAX} dependencies of flows"),
                        "make fewer flows depend on each other",
                    );
                    return;
                }
                let flow = &mut flows[i].flow;
                flow.start_ns = flow.start_ns.saturating_add(wait.start_ns);
                flow.after.extend(wait.after.iter().copied());
            }
            if item.flows.is_empty() {
                let name = item.name.as_deref().unwrap_or_default();
                let used = items.iter().any(|i| i.after.iter().any(|a| a == name));
                if let Some(after) = item
                    .after
                    .iter()
                    .find(|n| !names.by_name.contains_key(n.as_str()))
                {
                    root.error_at(
                        item.after_at.clone(),
                        names.unknown(after),
                        "correct `after`",
                    );
                } else if !used {
                    self.note(format!(
                        "[[compute]] `{name}` has no effect: no `after` refers to it"
                    ));
                }
            }
        }
    }
}

/// Start time and predecessors of a flow.
#[derive(Default)]
struct Wait {
    start_ns: u64,
    after: Vec<After>,
}

/// Tables by name, to resolve `after`.
struct Names<'a> {
    items: &'a [Item],
    by_name: HashMap<&'a str, usize>,
    /// Sender and receiver of each flow of an item.
    flows: Vec<Vec<(u32, u32)>>,
}

impl Names<'_> {
    fn unknown(&self, name: &str) -> String {
        let mut names: Vec<&str> = self.by_name.keys().copied().collect();
        names.sort_unstable();
        names.truncate(10);
        format!(
            "no table has the name `{name}`; known names: {}",
            names.join(", ")
        )
    }

    /// Adds to `wait` that `host` waits for its part of `name` and then `delay_ns`.
    fn complete(
        &self,
        name: &str,
        host: u32,
        delay_ns: u64,
        depth: usize,
        wait: &mut Wait,
    ) -> Result<(), String> {
        let Some(&at) = self.by_name.get(name) else {
            return Err(self.unknown(name));
        };
        if depth > self.items.len() {
            return Err(format!("`{name}` waits for itself"));
        }
        let item = &self.items[at];
        if let Some((hosts, time)) = &item.compute {
            if !hosts.contains(&host) {
                return Err(format!(
                    "host {host} waits for `{name}`, but is not in it; add it to `hosts`"
                ));
            }
            let delay_ns = delay_ns.saturating_add(*time);
            if item.after.is_empty() {
                wait.start_ns = wait.start_ns.max(delay_ns);
            }
            for name in &item.after {
                self.complete(name, host, delay_ns, depth + 1, wait)?;
            }
            return Ok(());
        }
        let flows = &self.flows[at];
        let ends = |i: usize| flows[i];
        let (mut gets, mut sends) = (Vec::new(), Vec::new());
        for i in 0..flows.len() {
            if ends(i).1 == host {
                gets.push(i);
            }
            if ends(i).0 == host {
                sends.push(i);
            }
        }
        // The flows to the host; without any, those from it; without any, all.
        let (waits_for, until) = match (gets.is_empty(), sends.is_empty()) {
            (false, _) => (gets, Finished::Delivered),
            (true, false) => (sends, Finished::Acknowledged),
            (true, true) => ((0..flows.len()).collect(), Finished::Delivered),
        };
        wait.after.extend(waits_for.into_iter().map(|i| After {
            flow: to_u32(item.flows.start + i),
            until,
            delay_ns,
        }));
        Ok(())
    }
}

/// `name` and `after` of a table.
pub(super) fn read_item(t: &Table<'_>) -> Item {
    struct Words(Vec<String>);
    impl Scalar for Words {
        const MUST: &'static str = "a name or a list of names";
        fn read(value: &Value<'_>) -> Option<Self> {
            String::read(value)
                .map(|name| vec![name])
                .or_else(|| Vec::<String>::read(value))
                .map(Words)
        }
        fn to_toml(&self) -> String {
            self.0.to_toml()
        }
    }
    let keys = [
        "graph",
        "path",
        "sources",
        "flow_count",
        "pairing",
        "file",
        "hosts",
        "flow_type",
        "traffic",
    ];
    Item {
        name: t.get("name").optional(),
        origin: keys
            .iter()
            .find(|key| t.has(key))
            .map_or(Origin::Default, |key| t.origin(key)),
        after: t
            .get::<Words>("after")
            .optional()
            .map_or_else(Vec::new, |words| words.0),
        after_at: t.origin("after"),
        flows: 0..0,
        compute: None,
    }
}
