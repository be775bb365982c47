# The same as manifests/bucket and manifests/cloud-run.yaml, for Terraform.
#   terraform apply -var project=my-project -var region=europe-west1 -var image=…

terraform {
  required_version = ">= 1.5"
  required_providers {
    google = {
      source  = "hashicorp/google"
      version = ">= 6.0"
    }
  }
}

variable "project" {
  type = string
}

variable "region" {
  type = string
}

variable "image" {
  type        = string
  description = "The image, best by digest"
}

variable "invokers" {
  type        = list(string)
  default     = []
  description = "Who may call it, such as group:team@example.com; nobody if empty"
}

variable "max_instances" {
  type    = number
  default = 20
}

provider "google" {
  project = var.project
  region  = var.region
}

resource "google_service_account" "baton" {
  account_id   = "baton"
  display_name = "Runs baton"
}

locals {
  buckets = {
    metadata    = "${var.project}-baton"
    checkpoints = "${var.project}-baton-checkpoints"
  }
}

resource "google_storage_bucket" "baton" {
  for_each                    = local.buckets
  name                        = each.value
  location                    = var.region
  storage_class               = "STANDARD"
  uniform_bucket_level_access = true
  public_access_prevention    = "enforced"

  versioning {
    enabled = false
  }

  # Locks are rewritten every few seconds: soft delete would keep, and bill, every one of them.
  soft_delete_policy {
    retention_duration_seconds = 0
  }

  lifecycle_rule {
    action {
      type = "Delete"
    }
    condition {
      age            = 1
      matches_prefix = ["probes/"]
    }
  }

  lifecycle_rule {
    action {
      type = "AbortIncompleteMultipartUpload"
    }
    condition {
      age = 1
    }
  }
}

# Objects of these buckets alone, and no right to change the buckets themselves.
resource "google_storage_bucket_iam_member" "baton" {
  for_each = local.buckets
  bucket   = google_storage_bucket.baton[each.key].name
  role     = "roles/storage.objectUser"
  member   = "serviceAccount:${google_service_account.baton.email}"
}

# Its value is put there by hand: gcloud secrets versions add baton-api-keys --data-file -
resource "google_secret_manager_secret" "keys" {
  secret_id = "baton-api-keys"
  replication {
    auto {}
  }
}

resource "google_secret_manager_secret_iam_member" "keys" {
  secret_id = google_secret_manager_secret.keys.id
  role      = "roles/secretmanager.secretAccessor"
  member    = "serviceAccount:${google_service_account.baton.email}"
}

resource "google_cloud_run_v2_service" "baton" {
  name     = "baton"
  location = var.region
  ingress  = "INGRESS_TRAFFIC_ALL"

  template {
    service_account                  = google_service_account.baton.email
    execution_environment            = "EXECUTION_ENVIRONMENT_GEN2"
    session_affinity                 = true
    max_instance_request_concurrency = 1
    timeout                          = "3600s"

    scaling {
      min_instance_count = 0
      max_instance_count = var.max_instances
    }

    containers {
      name  = "baton"
      image = var.image
      args  = ["serve"]

      ports {
        name           = "http1"
        container_port = 8080
      }

      env {
        name  = "SANDBOX_METADATA_BUCKET"
        value = local.buckets.metadata
      }
      env {
        name  = "SANDBOX_CHECKPOINT_BUCKET"
        value = local.buckets.checkpoints
      }
      env {
        name  = "FILESYSTEM_SNAPSHOT_BUCKET"
        value = local.buckets.checkpoints
      }
      env {
        name  = "BATON_MAX_SANDBOXES"
        value = "1"
      }
      env {
        name  = "BATON_DRAIN"
        value = "8s"
      }
      env {
        name = "BATON_API_KEYS"
        value_source {
          secret_key_ref {
            secret  = google_secret_manager_secret.keys.secret_id
            version = "latest"
          }
        }
      }

      resources {
        # Leases are renewed and commands run also while no request is open.
        cpu_idle          = false
        startup_cpu_boost = true
        limits = {
          cpu    = "2"
          memory = "2Gi"
        }
      }

      startup_probe {
        http_get {
          path = "/status"
          port = 8080
        }
        period_seconds    = 1
        timeout_seconds   = 1
        failure_threshold = 60
      }

      liveness_probe {
        http_get {
          path = "/"
          port = 8080
        }
        period_seconds    = 10
        timeout_seconds   = 5
        failure_threshold = 3
      }

      volume_mounts {
        name       = "state"
        mount_path = "/run/baton"
      }
    }

    volumes {
      name = "state"
      empty_dir {
        medium     = "MEMORY"
        size_limit = "1Gi"
      }
    }
  }
}

resource "google_cloud_run_v2_service_iam_member" "invoker" {
  for_each = toset(var.invokers)
  name     = google_cloud_run_v2_service.baton.name
  location = google_cloud_run_v2_service.baton.location
  role     = "roles/run.invoker"
  member   = each.value
}

output "url" {
  value = google_cloud_run_v2_service.baton.uri
}
