//! An embedder's program that holds cudarc's streams and memory. Without a driver forebay returns an error, and the
//! program continues; see Cargo.toml.

use cudarc::driver::CudaContext;
use forebay::device::cuda::{CudaDevice, CudaOptions};

fn main() {
    println!("beside {}:", std::any::type_name::<CudaContext>());
    // cudarc ends the program if there is no driver, so the program asks forebay first.
    if let Err(error) = CudaDevice::count(&CudaOptions::default()) {
        return println!("{error}");
    }
    match CudaContext::new(0) {
        Ok(context) => match forebay_embedder::decode(&context, None) {
            Ok(line) => println!("{line}"),
            Err(error) => println!("{error}"),
        },
        Err(error) => println!("{error:?}"),
    }
}
