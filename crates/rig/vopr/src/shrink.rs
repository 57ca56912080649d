//! The smallest plan that still fails: faults are left out one at a time, and clients by halves.

use crate::cluster::Shared;
use crate::outcome::Failure;
use crate::plan::Plan;
use crate::world::run;

/// Runs that shrinking may take.
const RUNS_MAX: usize = 400;

/// A smaller plan that fails, and its failure.
pub fn shrink(plan: &Plan, failure: &Failure, shared: &Shared) -> (Plan, Failure) {
    let (mut plan, mut failure) = (plan.clone(), failure.clone());
    let mut runs = 0;
    let mut attempt = |smaller: Plan, plan: &mut Plan, failure: &mut Failure| {
        runs += 1;
        if runs > RUNS_MAX {
            return false;
        }
        match run(&smaller, shared) {
            Ok(_) => false,
            Err(found) => {
                (*plan, *failure) = (smaller, found);
                true
            }
        }
    };
    loop {
        let before = (plan.faults.len(), plan.clients.len());
        let mut at = 0;
        while at < plan.faults.len() {
            let mut smaller = plan.clone();
            smaller.faults.remove(at);
            if !attempt(smaller, &mut plan, &mut failure) {
                at += 1;
            }
        }
        let mut size = plan.clients.len().div_ceil(2);
        while size > 0 {
            let mut at = 0;
            while at < plan.clients.len() {
                let mut smaller = plan.clone();
                let end = (at + size).min(smaller.clients.len());
                smaller.clients.drain(at..end);
                if !attempt(smaller, &mut plan, &mut failure) {
                    at += size;
                }
            }
            size /= 2;
        }
        if (plan.faults.len(), plan.clients.len()) == before {
            return (plan, failure);
        }
    }
}
