//! A dispatcher with a fleet of workers that a script controls.

mod rig;
mod rules;
mod scripts;
