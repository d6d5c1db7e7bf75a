//! `spin`: keeps a stream busy, which exposes work that should wait for the stream and does not.

use std::time::Duration;

use aquifer_device::{AccessRange, KernelArg, KernelMemory, Result, Stream};

use crate::args::{Args, KernelParam, Ranges};
use crate::error::KernelError;
use crate::kernel::{Kernel, Shape, Variant, Work};
use crate::kernels::Kernels;
use crate::module::Module;

pub(crate) const SPIN: Kernel = Kernel::of::<Spin>("spin", Module::Spin, Variant::Any);

/// Argument: nanoseconds.
#[derive(Debug)]
struct Spin {
    ns: u64,
}

impl Work for Spin {
    const PARAMS: &'static [KernelParam] = &[KernelParam::U64];

    fn parse(args: &mut Args<'_>) -> Result<Self> {
        Ok(Spin { ns: args.u64()? })
    }

    fn accesses(&self, ranges: Ranges<'_>) -> Result<Vec<AccessRange>> {
        Ok(ranges.done())
    }

    fn shape(&self, _: u32) -> Shape {
        Shape::new([1; 3], [1; 3])
    }

    fn busy_ns(&self) -> u64 {
        self.ns
    }

    fn run(&self, _: &mut dyn KernelMemory) -> Result<()> {
        Ok(())
    }
}

impl Kernels {
    /// The longest time of [`Kernels::spin`]: systems with a desktop stop kernels that run for some
    /// seconds.
    pub const SPIN_MAX: Duration = Duration::from_secs(1);

    /// Enqueues a kernel that does nothing until `time` has passed since it began: on one thread,
    /// so that other streams continue. It takes longer or shorter by up to one tick of the device's
    /// clock, 32 ns to 1 µs on most, as it may begin and end anywhere within a tick; on the
    /// virtual device the time is virtual.
    ///
    /// # Errors
    /// More than [`Kernels::SPIN_MAX`], a stream of another device, and errors of the driver.
    #[track_caller]
    pub fn spin(&self, stream: &Stream, time: Duration) -> Result<(), KernelError> {
        let check = self.check("spin", stream)?;
        if time > Kernels::SPIN_MAX {
            return Err(check.argument("time", format!("is {time:?}, more than {:?}", Kernels::SPIN_MAX)));
        }
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.access(stream, check.kernel, &[], &[])?.launch(&SPIN, vec![KernelArg::U64(ns)])
    }
}
