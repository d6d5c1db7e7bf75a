//! Mapped memory: what is mapped where.

pub(crate) mod account;
pub(crate) mod capacity;
pub(crate) mod deferred_release;
pub(crate) mod frames;
pub(crate) mod granules;
pub(crate) mod layout;
pub(crate) mod pins;
pub(crate) mod places;
