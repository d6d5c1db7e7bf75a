//! Parameters of models: named tensors that move together, and the files that they come from.
//!
//! * [`ParamSet`] holds the tensors, and `relocate` moves all of them or none;
//! * [`Checkpoint`] reads the headers of safetensors files, `load` brings their tensors to a place,
//!   `load_into` to those of a set, and `save` writes such files.

mod checkpoint;
mod errors;
mod load;
mod load_into;
mod outgoing;
mod param_set;
mod relocate;
mod save;

pub use checkpoint::{Checkpoint, TensorEntry};
pub(crate) use errors::{Listed, mismatch};
pub use load::Load;
pub use param_set::ParamSet;
pub use relocate::Progress;

#[cfg(test)]
pub(crate) mod tests;
