//! The list of all kernels.

use crate::fill::Fill;
use crate::kernel::Kernel;
use crate::module::Module;

/// Every kernel of the set.
pub static KERNELS: &[Kernel] = &[Kernel::of::<Fill>("fill", Module::Bytes)];

/// The kernel with the given name.
///
/// ```
/// use aquifer_kernels::{Param, find};
/// assert_eq!(find("fill").unwrap().params, [Param::Ptr, Param::U64, Param::U64]);
/// assert!(find("flil").is_none());
/// ```
pub fn find(name: &str) -> Option<&'static Kernel> {
    KERNELS.iter().find(|kernel| kernel.name == name)
}
