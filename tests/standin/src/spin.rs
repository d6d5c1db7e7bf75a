//! Keeping a stream of a real GPU busy: the kernel `spin`, launched through a driver.

use std::sync::Arc;
use std::time::Duration;

use aquifer_device::{Code, DeviceError, Driver, KernelArg, Operation, RawModule, RawStream, Result};
use aquifer_kernels::{Kernels, Module};

/// The kernel that keeps streams of one driver busy. Its module stays loaded.
#[derive(Clone, Debug)]
pub struct Spin {
    driver: Arc<dyn Driver>,
    module: RawModule,
}

impl Spin {
    /// Loads the kernel.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn load(driver: Arc<dyn Driver>) -> Result<Spin> {
        let module = driver.load_module(Module::Spin.ptx())?;
        Ok(Spin { driver, module })
    }

    /// Keeps a stream busy for `time` from the end of its present work, in as few launches as that
    /// takes.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn enqueue(&self, stream: RawStream, time: Duration) -> Result<()> {
        let lacking =
            || DeviceError::refused(Operation::Launch, Code::INVALID_VALUE).with_detail("there is no kernel `spin`");
        let kernel = aquifer_kernels::find("spin").ok_or_else(lacking)?;
        let mut left = time;
        while !left.is_zero() {
            let part = left.min(Kernels::SPIN_MAX);
            let ns = u64::try_from(part.as_nanos()).unwrap_or(u64::MAX);
            let mut launch = kernel.launch(Some(self.module), vec![KernelArg::U64(ns)], 1)?;
            launch.host = None;
            // SAFETY: the kernel touches no memory, and takes the time as its only argument.
            unsafe { self.driver.launch(&launch, stream) }?;
            left -= part;
        }
        Ok(())
    }
}
