//! Memory that sleeps: which, and how it is kept apart from the rest.

pub(crate) mod absent;
pub(crate) mod choose;
pub(crate) mod cordon;
pub(crate) mod wake;
