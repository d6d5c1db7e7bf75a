//! Transfers between devices of two kinds, which go by way of the host.

use aquifer::device::sim::SimDriver;
use aquifer::tensor::To;
use aquifer::transfer::Transfer;
use aquifer::{Pending, Tensor};
use aquifer_tests::prelude::*;

use crate::support::Gpu;

/// More than the calling thread copies by itself.
const LEN: usize = 1 << 20;

fn runtime(device: &Device) -> Transfer {
    Transfer::new(&Allocator::new(device, Config::default()).unwrap()).unwrap()
}

/// What a tensor of ones becomes on the simulated device, as elements of twice the size.
fn sent_and_widened(from: &Gpu, sim: &Arc<SimDriver>, fails: bool) -> Result<Vec<f64>, String> {
    let (from, to) = (runtime(&from.device), runtime(&Device::new(sim.clone())));
    let ones = Tensor::full(&[LEN], 1.0_f32, &from).unwrap();
    if fails {
        to.allocator().kernels().unwrap();
        sim.inject(Fault::Nth { operation: Some(Operation::CopyToDevice), nth: 1, code: Code(999) });
    }
    let wide = Tensor::scalar(0.0_f64).unwrap().dtype();
    let sent = ones.to_with(&to, To::new().dtype(wide)).and_then(Pending::wait);
    let sent = sent.map_err(|error| error.to_string())?;
    sent.to_vec::<f64>().map_err(|error| error.to_string())
}

#[test]
fn tensors_that_are_converted_beyond_the_host_are_whole_or_errors() {
    let gpu = Gpu::new();
    let sim = SimDriver::new(SimConfig::default());
    let sent = sent_and_widened(&gpu, &sim, false).unwrap();
    assert!(sent.len() == LEN && sent.iter().all(|&element| element == 1.0));
    let failed = sent_and_widened(&gpu, &sim, true);
    assert!(matches!(&failed, Err(error) if error.contains("injected")), "{:?}", failed.map(|sent| sent[0]));
    assert_eq!(sim.violations(), []);
    gpu.assert_no_violation();
}
