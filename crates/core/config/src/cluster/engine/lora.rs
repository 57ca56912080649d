//! `[engine.lora]`: LoRA adapters of an engine, and their limits.

use crate::doc::{Origin, Table, optional, section, value};
use slipstream_base::width::round_u64;

/// LoRA adapters of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoraConfig {
    /// Adapters in a step, and on the GPUs.
    pub max_loras: u32,
    /// Adapters in host memory, those on the GPUs included.
    pub max_cpu_loras: u32,
    /// Time to load one into host memory, ns.
    pub load_ns: u64,
    /// Time to copy one from there to the GPUs, ns.
    pub activate_ns: u64,
}

section! {
    keys LoraKeys of "engine.lora" {
        /// LoRA adapters that a step may use, and that fit the GPUs (`docs/engine-model.md`). 0: any number, which
        /// take no time.
        ///
        /// Low: requests of other adapters wait, and adapters are copied again and again.
        key max_loras: u32 = value(0).within(0..=1_024);
        /// Adapters that fit host memory, those on the GPUs included.
        ///
        /// Low: adapters are loaded again and again.
        key max_cpu_loras?: u32 = optional().within(1..=65_536)
            .with_description("`max_loras` to 65,536").with_default_text("`max_loras`");
        /// Time to load an adapter that host memory lacks. The step that needs it waits.
        ///
        /// High: every request in the step waits.
        key load_ms: f64 = value(0.0).within(0.0..=1e6).unit("ms");
        /// Time to copy an adapter from host memory to the GPUs. The step that needs it waits.
        ///
        /// As `load_ms`.
        key activate_ms: f64 = value(0.0).within(0.0..=1e6).unit("ms");
    }
}

pub(super) fn read_lora(t: &Table<'_>) -> Option<LoraConfig> {
    let max_loras: u32 = LoraKeys::max_loras().read(t);
    if max_loras == 0 {
        for key in ["max_cpu_loras", "load_ms", "activate_ms"] {
            t.unused(key, "max_loras", "`max_loras` is 0");
        }
        return None;
    }
    let max_cpu_loras: u32 = LoraKeys::max_cpu_loras()
        .field(t)
        .or_from(Origin::Derived("`max_loras`".into()), max_loras);
    if max_cpu_loras < max_loras {
        t.error(
            "max_cpu_loras",
            format!("`max_cpu_loras` is less than `max_loras`, {max_loras}"),
            format!("set it to {max_loras} or more"),
        );
    }
    let ns = |ms: f64| round_u64(ms * 1e6);
    Some(LoraConfig {
        max_loras,
        max_cpu_loras,
        load_ns: ns(LoraKeys::load_ms().read(t)),
        activate_ns: ns(LoraKeys::activate_ms().read(t)),
    })
}
