//! Counters of engines that left. If they vanished and came back at 0, they would hide the failures for which the engine left.

use std::collections::VecDeque;
use std::sync::Arc;

use slipstream_base::Role;

use super::counters::Counters;

/// Limit of engines with rows of their own; the counters of the oldest beyond it are summed.
const ENGINES_MAX: usize = 64;

/// Prefix of the label of the sums.
const OTHERS: &str = "removed";

/// Counters of an engine, with the properties that determine in which metrics they appear.
#[derive(Clone, Debug)]
pub(super) struct Row {
    /// Value of the label `engine`.
    pub(super) url: String,
    pub(super) role: Role,
    pub(super) is_mirror: bool,
    pub(super) counters: Arc<Counters>,
}

/// Engines that left, in that order.
#[derive(Debug, Default)]
pub(super) struct Retired {
    rows: VecDeque<Row>,
    /// Sums of older engines, per role and use.
    others: Vec<Row>,
}

impl Retired {
    /// The engine of `row` leaves.
    pub(super) fn retire(&mut self, row: Row) {
        self.rows.push_back(row);
        while self.rows.len() > ENGINES_MAX {
            let Some(oldest) = self.rows.pop_front() else {
                return;
            };
            let is_alike = |of: &&Row| of.role == oldest.role && of.is_mirror == oldest.is_mirror;
            match self.others.iter().find(is_alike) {
                Some(sum) => sum.counters.add(&oldest.counters),
                None => self.others.push(Row {
                    url: format!("{OTHERS}-{}", self.others.len()),
                    ..oldest
                }),
            }
        }
    }

    /// The counters of the engine of `new` at its last stay, to continue with.
    pub(super) fn revive(&mut self, new: &Row) -> Option<Arc<Counters>> {
        let is_it =
            |of: &Row| of.url == new.url && of.role == new.role && of.is_mirror == new.is_mirror;
        let at = self.rows.iter().rposition(is_it)?;
        Some(self.rows.remove(at)?.counters)
    }

    /// All rows.
    pub(super) fn rows(&self) -> Vec<Row> {
        self.others.iter().chain(&self.rows).cloned().collect()
    }
}
