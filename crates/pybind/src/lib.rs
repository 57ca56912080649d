//! The Rust part of slipstream's Python package: the extension module `slipstream._native`.
//!
//! - `study`: simulations, sweeps and plans, and `table`: their results as Arrow tables.
//! - The others: the vLLM connector.
//!
//! The connector calls Rust once per scheduler step, with all changes since the last
//! one (`keys::KeySet::step`), never once per block.
//!
//! pyo3 turns panics into Python exceptions. Values from Python are checked at their entry.
// PyO3's methods and its conversions of errors take their arguments by value.
#![allow(clippy::needless_pass_by_value)]

mod content;
mod groups;
mod keys;
mod peers;
mod steps;
mod store;
mod study;
mod table;
mod warnings;

use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyDict;
use slipstream_kvstore::Medium;

/// Locks a mutex whose data stays valid if a holder panics.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    warnings::collect();
    let mediums = PyDict::new(module.py());
    for medium in Medium::ALL {
        mediums.set_item(medium.name(), medium.vllm_name())?;
    }
    module.add("MEDIUMS", mediums)?;
    module.add_function(wrap_pyfunction!(warnings::take_warnings, module)?)?;
    module.add_function(wrap_pyfunction!(content::digest_files, module)?)?;
    module.add_function(wrap_pyfunction!(study::read_text, module)?)?;
    module.add_function(wrap_pyfunction!(study::check_slo, module)?)?;
    module.add_function(wrap_pyfunction!(study::cluster_toml, module)?)?;
    module.add_function(wrap_pyfunction!(study::workload_text, module)?)?;
    module.add_function(wrap_pyfunction!(study::start_simulate, module)?)?;
    module.add_function(wrap_pyfunction!(study::start_sweep_check, module)?)?;
    module.add_function(wrap_pyfunction!(study::start_sweep_rows, module)?)?;
    module.add_function(wrap_pyfunction!(study::start_sweep_finish, module)?)?;
    module.add_function(wrap_pyfunction!(study::start_plan, module)?)?;
    module.add_function(wrap_pyfunction!(study::start_plan_trials, module)?)?;
    module.add_function(wrap_pyfunction!(study::start_predict, module)?)?;
    module.add_class::<study::Job>()?;
    module.add_class::<table::Table>()?;
    module.add_class::<groups::Groups>()?;
    module.add_class::<keys::KeySet>()?;
    module.add_class::<keys::KeyMirror>()?;
    module.add_class::<steps::StepMetadata>()?;
    module.add_class::<steps::FilledBlocks>()?;
    module.add_class::<store::Store>()?;
    module.add_class::<peers::Peers>()
}
