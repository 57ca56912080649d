//! The control plane of a router, inside this process, in front of engines that answer by a script.

mod embedded;
