//! Deliberate bugs.
//!
//! `planted!("name")` marks a place where production code would go wrong if that bug were planted. Without
//! the feature `planted` it is the constant `false`, and the code behind it is not compiled in. With the
//! feature, `slipstream-vopr` plants one bug at a time, and has to find it.

/// Whether the bug with this name is planted.
#[cfg(not(feature = "planted"))]
#[macro_export]
macro_rules! planted {
    ($name:literal) => {
        false
    };
}

/// Whether the bug with this name is planted.
#[cfg(feature = "planted")]
#[macro_export]
macro_rules! planted {
    ($name:literal) => {
        $crate::planted::is($name)
    };
}

#[cfg(feature = "planted")]
pub use imp::{is, plant};

#[cfg(feature = "planted")]
mod imp {
    use std::cell::Cell;

    thread_local! {
        static PLANTED: Cell<&'static str> = const { Cell::new("") };
    }

    /// Plants the bug `name` on this thread, instead of the one before; an empty name: none.
    pub fn plant(name: &'static str) {
        PLANTED.set(name);
    }

    /// Whether the bug `name` is planted.
    pub fn is(name: &str) -> bool {
        PLANTED.get() == name
    }
}
