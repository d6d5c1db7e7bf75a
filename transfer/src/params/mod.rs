//! Parameters of models: named tensors that move together, and the files that they come from.
//!
//! * [`ParamSet`] holds the tensors, and `relocate` moves all of them or none;
//! * [`Checkpoint`] reads the headers of safetensors files, `load` brings their tensors to a place, `load_into` to
//!   those of a set, and `save` writes such files.

mod checkpoint;
mod checkpoint_error;
mod load;
mod load_into;
mod mismatch;
mod param_set;
mod relocate;
mod save;
mod small;

pub use checkpoint::{Checkpoint, TensorEntry};
pub use checkpoint_error::{CheckpointError, CheckpointFault};
pub use load::{Load, OtherDTypes};
pub use mismatch::{DifferentTensor, SetMismatch};
pub(crate) use param_set::Listed;
pub use param_set::{Param, ParamKind, ParamSet, Stray};
pub use relocate::{Progress, Relocate};

#[cfg(test)]
pub(crate) mod tests;
